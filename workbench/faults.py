"""Planted faults: contrived spikes of known cause, which keep a diagnosis honest.

`workbench train --fault NAME@STEP[:key=value,…]`, as often as wanted; `workbench faults` prints this table. Keys have
the defaults shown; MIDDLE is the block in the middle of the model, and `rows` counts rows in the middle of the batch.

    fault             keys                                            applied    replay  verdict
    garbage           rows=all                                        data       exact   data
    repeated-token    rows=all token=0                                data       exact   data
    targets-shifted   rows=all by=1                                   data       exact   data
    targets-shuffled  rows=all                                        data       exact   data
    targets-ignored   rows=all                                        data       exact   data
    repeated-batch    of=STEP-1                                       data       exact   no-spike
    lr                factor=100 until=STEP                           schedule   exact   schedule
    no-clip                                                           option     exact   no-spike
    beta2             value=0.5 for=end                               option     exact   optimizer
    eps               value=1e-7 for=end                              option     exact   no-spike
    attention-growth  layer=blocks.0.attention growth=1.15 for=end    option     exact   attention-logits
    unstable-rate     rate=1                                          option     exact   curvature
    frozen            layer=MIDDLE.mlp                                option     exact   no-spike
    moments-zeroed    of=v                                            state      exact   resume
    moments-swapped                                                   state      exact   resume
    v-scaled          factor=1e-9                                     state      exact   resume
    lost-optimizer                                                    state      exact   no-spike
    lost-cursor                                                       state      exact   no-spike
    lost-rng                                                          state      exact   no-spike
    attention-scaled  layer=blocks.0.attention factor=100             state      exact   resume
    weight-scaled     path=blocks.0.attention.value.weight factor=20  state      exact   resume
    weight-bit        path=MIDDLE.mlp.up.weight index=0 bit=30        state      exact   resume
    m-bit             path=MIDDLE.mlp.up.weight index=0 bit=30        state      exact   resume
    v-bit             path=MIDDLE.mlp.up.weight index=0 bit=31        state      exact   resume
    gradient-bit      path=MIDDLE.mlp.up.weight index=0 bit=30        transient  never   transient-fault
    log-bit           bit=24                                          transient  never   transient-fault

How a fault is applied decides what a replay can know of it:

    data, schedule, option  Part of the run's ordinary description: its data stream, schedule or settings. A replay
                            rebuilds it without knowing that it was planted. A step function takes its options once, so
                            an option holds for the whole run, and STEP is 1; a fork can change it from a step on. Those
                            with the key `for` are the optimizer's, and hold for so many steps from STEP on.
    state                   The state between two steps is changed and committed as a checkpoint, and a segment starts
                            from it: just what a resume from a damaged or incomplete checkpoint is. The replay of step N
                            starts from the changed state and is exact. Done once, by the process that plants it.
    transient               A bit is flipped in one step, or in one line of the log, and nothing describes it: the
                            telemetry contradicts every replay.

What tells `resume` from `optimizer`: both may end in an update that the moments explain. Where the lanes that telemetry
logged after step N-1 are not those with which the next segment starts (`Run.seam`), something happened outside of any
step, and that is `resume`, whichever lane it was. Where they are the same, or no segment starts there, the steps
themselves led to it: `optimizer`. So every edit of the moments is labelled `resume`.

Two of them are mechanisms known from the literature rather than mistakes. `attention-growth` gives queries and keys of
a layer a weight decay of the wrong sign, so that they grow by a factor an update, and attention logits by its square:
the growth that Wortsman et al. 2023 (arXiv:2309.14322) and Dehghani et al. 2023 (arXiv:2302.05442) find before
divergence, in tens of steps. `unstable-rate` trains at one constant rate, which is more than the curvature allows, with
usual data and moments (Cohen et al. 2021, arXiv:2103.00065; 2022, arXiv:2207.14484): in such a run a spike is of the
step's length; but where only a gradient norm rises, or logits run away first, a diagnosis that names another mechanism
need not be wrong.

The verdict is that for the default size, where loss or gradient norm can show it; where neither does, it is no-spike.
Measured at preset tiny (300 steps, seeds 1 and 2), planted at steps 160 and 220: spike detection sees a fault at
STEP, or at STEP + 1 where an update has to come first (a flipped weight and a flipped m of seed 1 some steps
late). Not seen are `repeated-batch`, `no-clip`, `frozen`, a lost cursor or random state, and one row of garbage in
eight; nor a lost optimizer: the schedule lives in its step counter, so the learning rate warms up again
(`moments-zeroed` keeps the counter, and of m or of both it moves no loss at beta2 = 0.95). `beta2` needs --max-lr
5e-3, and spikes again and again from step 50 on. Scaled attention shows in the gradient norm, within 6 steps, in a
model that has learnt to attend (--max-lr 3e-3, step 220). `eps` matters in float16: `--dtype float16 --fault eps@1` is
the recipe for `precision`, where v underflows and updates of m / eps overflow (NaN at steps 49 and 40). A flip below
the exponent shows nowhere.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from .errors import ExperimentError

Applied = Literal["data", "schedule", "option", "state", "transient"]
Verdict = Literal[
    "data",
    "optimizer",
    "schedule",
    "curvature",
    "attention-logits",
    "precision",
    "resume",
    "transient-fault",
    "no-spike",
    "unknown",
]


@dataclass(frozen=True)
class Kind:
    """A row of the table above.

    Attributes:
        keys: each with its default, as text; MIDDLE is the middle block.
        applied: how; see above.
        verdict: what a diagnosis should say where the fault shows at its default size.
        what: in a few words.
    """

    keys: dict[str, str]
    applied: Applied
    verdict: Verdict
    what: str

    @property
    def replay(self) -> str:
        """Whether a replay reproduces it: "exact" or "never"."""
        return "never" if self.applied == "transient" else "exact"


_BIT = {"path": "MIDDLE.mlp.up.weight", "index": "0", "bit": "30"}
_ROWS = {"rows": "all"}

KINDS: dict[str, Kind] = {
    "garbage": Kind(_ROWS, "data", "data", "rows of random tokens"),
    "repeated-token": Kind(_ROWS | {"token": "0"}, "data", "data", "rows of one token"),
    "targets-shifted": Kind(_ROWS | {"by": "1"}, "data", "data", "targets so many tokens further on"),
    "targets-shuffled": Kind(_ROWS, "data", "data", "targets in random order"),
    "targets-ignored": Kind(_ROWS, "data", "data", "targets that do not count"),
    "repeated-batch": Kind({"of": "STEP-1"}, "data", "no-spike", "the batch of another step again"),
    "lr": Kind({"factor": "100", "until": "STEP"}, "schedule", "schedule", "learning rate times factor"),
    "no-clip": Kind({}, "option", "no-spike", "gradients are not clipped"),
    "beta2": Kind({"value": "0.5", "for": "end"}, "option", "optimizer", "Adam's beta2"),
    "eps": Kind({"value": "1e-7", "for": "end"}, "option", "no-spike", "Adam's epsilon"),
    "attention-growth": Kind(
        {"layer": "blocks.0.attention", "growth": "1.15", "for": "end"},
        "option",
        "attention-logits",
        "queries and keys grow by weight decay of the wrong sign",
    ),
    "unstable-rate": Kind({"rate": "1"}, "option", "curvature", "a constant rate beyond the edge of stability"),
    "frozen": Kind({"layer": "MIDDLE.mlp"}, "option", "no-spike", "parameters that are not trained"),
    "moments-zeroed": Kind({"of": "v"}, "state", "resume", "Adam's m, v or both lost"),
    "moments-swapped": Kind({}, "state", "resume", "m in the place of v"),
    "v-scaled": Kind({"factor": "1e-9"}, "state", "resume", "Adam's v times factor"),
    "lost-optimizer": Kind({}, "state", "no-spike", "moments and step counter lost"),
    "lost-cursor": Kind({}, "state", "no-spike", "the data starts anew"),
    "lost-rng": Kind({}, "state", "no-spike", "the random state starts anew"),
    "attention-scaled": Kind(
        {"layer": "blocks.0.attention", "factor": "100"}, "state", "resume", "query weights times factor"
    ),
    "weight-scaled": Kind(
        {"path": "blocks.0.attention.value.weight", "factor": "20"}, "state", "resume", "one matrix times factor"
    ),
    "weight-bit": Kind(_BIT, "state", "resume", "one bit of a weight"),
    "m-bit": Kind(_BIT, "state", "resume", "one bit of Adam's m"),
    "v-bit": Kind(_BIT | {"bit": "31"}, "state", "resume", "one bit of Adam's v"),
    "gradient-bit": Kind(_BIT, "transient", "transient-fault", "one bit of a gradient"),
    "log-bit": Kind({"bit": "24"}, "transient", "transient-fault", "one bit of the loss in the log"),
}


@dataclass(frozen=True)
class Fault:
    """A parsed `NAME@STEP[:key=value,…]`."""

    name: str
    step: int
    keys: dict[str, str]

    def __str__(self) -> str:
        return f"{self.name}@{self.step}"

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def text(self, key: str) -> str:
        """The value of a key, or its default."""
        return self.keys.get(key, self.kind.keys[key])

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number from `low` to `high`; `default`, where given, if the key is not.

        Raises:
            ExperimentError: it is another.
        """
        if key not in self.keys and default is not None:
            return default
        text = self.text(key)
        if not (text.isascii() and text.isdecimal()) or len(text) > 20 or not low <= int(text) <= high:
            raise ExperimentError(f"fault {self} has {key}={text}; expected {low} to {high}")
        return int(text)

    def number(self, key: str, below: float = math.inf) -> float:
        """A number from 0 to below `below`.

        Raises:
            ExperimentError: it is another.
        """
        text = self.text(key)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < below:
            raise ExperimentError(
                f"fault {self} has {key}={text}; expected a number from 0"
                f"{'' if below == math.inf else f' to below {below:g}'}"
            )
        return value

    def choice(self, key: str, among: list[str]) -> str:
        """One of some words.

        Raises:
            ExperimentError: it is another.
        """
        text = self.text(key)
        if text not in among:
            raise ExperimentError(f"fault {self} has {key}={text}; expected one of {', '.join(among)}")
        return text


def parse(text: str) -> Fault:
    """Parses `garbage@40` or `garbage@40:rows=1`.

    Raises:
        ExperimentError: it is malformed, or names an unknown fault or key, or a step where it can't be planted.
    """
    match = re.fullmatch(r"([a-z0-9-]+)@(\d+)(?::(.+))?", text)
    if not match:
        raise ExperimentError(
            f"fault {text!r} is malformed; expected NAME@STEP or NAME@STEP:key=value, as in garbage@40"
        )
    name, step, rest = match.groups()
    keys = dict(part.partition("=")[::2] for part in rest.split(",")) if rest else {}
    if name not in KINDS:
        raise ExperimentError(f"fault {name!r} is unknown; expected one of {', '.join(KINDS)}")
    kind = KINDS[name]
    if unknown := sorted(keys.keys() - kind.keys.keys()):
        raise ExperimentError(
            f"fault {name} has no key {unknown[0]!r}; expected {', '.join(sorted(kind.keys)) or 'none'}"
        )
    if int(step) < 1:
        raise ExperimentError(f"fault {text!r} is at step {step}; steps are counted from 1")
    if kind.applied == "option" and "for" not in kind.keys and int(step) != 1:
        raise ExperimentError(f"fault {text!r} is at step {step}, but it holds for the whole run; expected {name}@1")
    if kind.applied == "state" and int(step) < 2:
        raise ExperimentError(f"fault {text!r} is at step 1, before which no step has left a state; expected 2 or more")
    return Fault(name, int(step), keys)


def table() -> pd.DataFrame:
    """The faults that can be planted: fault, keys (with their defaults), applied, replay, verdict, what."""
    rows = [
        (name, " ".join(f"{key}={default}" for key, default in kind.keys.items()), kind.applied, kind.replay)
        + (kind.verdict, kind.what)
        for name, kind in KINDS.items()
    ]
    return pd.DataFrame(rows, columns=["fault", "keys", "applied", "replay", "verdict", "what"])
