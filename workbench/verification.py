"""What `Run.verify` says of a run: each thing that was looked at, a table, one sentence.

Knows the format; reads no run, performs no step and imports no MLX.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from .recorded.checkpoint_sizes import CheckpointSize, size_sentence

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["data", "manifest", "telemetry", "segment", "batch", "checkpoint", "trace", "step"]
Verdict = Literal["exact", "mismatch", "unverified"]
_OWN = ("manifest", "telemetry", "segment", "batch", "checkpoint")  # a corpus is elsewhere, too


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        kind: "data", "manifest", "telemetry", "segment", "batch" (the stored ones), "checkpoint", "trace", or "step":
            one that is proven by replay.
        what: which one.
        verdict: "exact"; "mismatch": damaged, missing, or with other bits than recorded; "unverified": there is nothing
            to compare with.
        detail: what was compared, or what is wrong.
    """

    kind: Kind
    what: str
    verdict: Verdict
    detail: str

    @property
    def clause(self) -> str:
        """It as a part of a sentence, whose full stop is not its own."""
        return f"{self.kind} {self.what}: {self.detail.rstrip('.')}"


class Verification(msgspec.Struct, kw_only=True):
    """What `Run.verify` returns.

    Attributes:
        run, name: identity and folder name of the run.
        checks: in the order in which they were made.
        steps: that the telemetry has, in all segments.
        on_the_way: steps that were performed, and compared, only to reach those of the sample.
        seed: of the sample.
        notices: what the user should know besides.
        sizes: what each checkpoint takes on the disk; none if one can't be read.
    """

    run: str
    name: str
    checks: list[Check]
    steps: int
    on_the_way: int
    seed: int
    seconds: float
    notices: list[str]
    sizes: list[CheckpointSize] = []

    @property
    def exact(self) -> bool:
        """Nothing is damaged, and each step that was replayed has the run's bits."""
        return all(one.verdict == "exact" or one.verdict == "unverified" and one.kind != "step" for one in self.checks)

    @property
    def whole(self) -> bool:
        """Exact, and nothing of the run's own is missing: lines, the end of its telemetry, checkpoints, batches."""
        return self.exact and not any(one.verdict == "unverified" and one.kind in _OWN for one in self.checks)

    @property
    def sealed(self) -> bool:
        """Its lines have digests of themselves, so that an edit of any of them is seen."""
        return any((one.kind, one.what) == ("telemetry", "seals") for one in self.checks)

    @property
    def frame(self) -> pd.DataFrame:
        """One row a check: kind, what, verdict, detail."""
        import pandas as pd

        rows = [(one.kind, one.what, one.verdict, one.detail) for one in self.checks]
        return pd.DataFrame(rows, columns=["kind", "what", "verdict", "detail"])

    @property
    def summary(self) -> pd.DataFrame:
        """One row a kind of check: how many are exact, mismatch and unverified."""
        import pandas as pd

        counted = Counter[tuple[str, str]]((one.kind, one.verdict) for one in self.checks)
        kinds = list(dict.fromkeys(one.kind for one in self.checks))
        verdicts = ("exact", "mismatch", "unverified")
        return pd.DataFrame(
            [(kind, *(counted[kind, one] for one in verdicts)) for kind in kinds], columns=["kind", *verdicts]
        )

    def sentence(self) -> str:
        """The answer in one sentence."""
        wrong = [one for one in self.checks if one.verdict == "mismatch"]
        if wrong:
            more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            return f"{self.name} is not what it says: {wrong[0].clause}{more}."
        proven = [one for one in self.checks if one.kind == "step"]
        unknown = [one for one in self.checks if one.verdict == "unverified" and one.kind != "step"]
        rest = f"; {len(unknown)} could not be verified" if unknown else ""
        if missing := [one for one in unknown if one.kind in _OWN]:
            rest += f", first {missing[0].clause}"
        good = f"{sum(one.verdict == 'exact' for one in self.checks if one.kind != 'step')} checks are exact{rest}"
        is_ = "is whole" if self.whole else "agrees with what it says, as far as that goes" if self.exact else ""
        if not proven:
            return f"{self.name} {is_}: {good}. No step was replayed."
        if len(proven) == 1 and proven[0].what.endswith("to sample"):  # see `proving.not_replayed`
            return (
                f"{self.name} {is_ or 'is not proven'}: {good}. No step was replayed: {proven[0].detail.rstrip('.')}."
            )
        exact = sum(one.verdict == "exact" for one in proven)
        way = f", and {self.on_the_way} on the way to them" if self.on_the_way else ""
        return (
            f"{self.name} {is_ or 'is not proven'}: {good}; "
            f"{exact} of {len(proven)} replayed steps have the run's bits{way}."
        )

    def limits(self) -> list[str]:
        """What this does not prove, a sentence each."""
        proven = sum(one.kind == "step" and one.verdict == "exact" for one in self.checks)
        left = self.steps - proven - self.on_the_way
        return [
            *([f"{left} of {self.steps} steps were not replayed: read, not proven (--replay N)."] if left > 0 else []),
            "No replay compares times, speed, memory and validation losses"
            + ("." if self.sealed else "; an edit of these is not seen."),
            "Nothing is signed: files that were all written anew so that they agree pass, unless the steps are "
            "replayed; a run that was trained anew passes then, too.",
        ]

    def storage(self) -> str | None:
        """What the checkpoints take on the disk, in one sentence; None: there is none, or one can't be read."""
        return size_sentence(self.sizes) if self.sizes else None

    def to_json(self) -> str:
        document = msgspec.to_builtins(self) | {
            "exact": self.exact,
            "whole": self.whole,
            "sentence": self.sentence(),
            "limits": self.limits(),
        }
        return msgspec.json.format(msgspec.json.encode(document)).decode()

    def __repr__(self) -> str:
        return f"Verification({self.name!r}, exact={self.exact}, checks={len(self.checks)})"

    def _repr_html_(self) -> str:
        wrong = self.frame[[one.verdict != "exact" for one in self.checks]]
        tables = [self.summary, *([wrong] if len(wrong) else [])]
        return f"<p>{html.escape(self.sentence())}</p>" + "".join(one.to_html(index=False) for one in tables)


def failures(found: Verification) -> Sequence[Check]:
    """The checks that are not exact, mismatches first."""
    return sorted((one for one in found.checks if one.verdict != "exact"), key=lambda one: one.verdict != "mismatch")
