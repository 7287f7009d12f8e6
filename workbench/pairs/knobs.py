"""What two manifests differ in, setting by setting: knobs, their consequences, and what can't move a bit.

A knob is named by its dotted key, such as `config.schedule.max_lr`. Knows manifests; nothing of telemetry or MLX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ..compare import ITEMS
from ..manifest import DataFile, Manifest
from .command_lines import differing_scripts, fork_changes

Kind = Literal["knob", "consequence", "no effect", "code", "environment"]

# What decides how long or how a run is looked at, and moves no bit of a step that both have.
_HARMLESS = ("config.steps", "config.val_every", "config.sample_every", "config.prefetch")
_RECORDING = ("save_every", "keep_last", "keep_every", "spikes")

START = ""  # the state that a run starts from, before the first item of its first step
BATCH, FORWARD, UPDATE, WEIGHTS = "batch_hash", "per_layer_act_norms", "adam_m_norms", "state.weights"
# The first item of a step that a setting can reach. What is not listed may reach everything, the start too. The
# trainer's optimizer is AdamW, in which neither rate, epsilon nor decay touches the moments of the same step.
_REACH = (
    ("config.schedule.", WEIGHTS),
    ("config.adamw.beta1", UPDATE),
    ("config.adamw.beta2", "adam_v_norms"),
    ("config.adamw.", WEIGHTS),
    ("config.clip", UPDATE),
    ("options.clip", UPDATE),
    ("optimizer.class", START),  # another class may keep another state
    ("optimizer.", UPDATE),
    ("lr", UPDATE),
    ("config.model.dropout", FORWARD),
    ("config.compile", FORWARD),
    ("config.deterministic", FORWARD),
    ("options.compile", FORWARD),
    ("options.deterministic", FORWARD),
    ("config.substitutions", BATCH),
    ("config.mixture", BATCH),
    ("config.batch", BATCH),
    ("config.accumulate", BATCH),
    ("config.val_split", BATCH),
    ("options.accumulate", BATCH),
    ("data.", BATCH),
)

# Of what rebuilds a run, what is compared in a way of its own; and which of a script's recorders it was.
_ELSEWHERE = ("config", "script", "argv", "recorder", "module")

_NOT_DATA = ("config.model.", "optimizer.", "parameters")  # of what reaches the start, what no batch depends on


class Setting(msgspec.Struct, frozen=True):
    """A setting in which two runs differ.

    Attributes:
        name: dotted key.
        kind: `knob`; `consequence` of a knob; `no effect` on bits; `code`: other scripts, or other versions of the
            workbench;
            `environment`: the numeric environment.
        a, b: JSON values; null where a run has no such setting.
    """

    name: str
    kind: Kind
    a: Any
    b: Any

    @property
    def reach(self) -> str:
        """The first item of a step that it can reach; "": even the state that a run starts from."""
        return next((item for prefix, item in _REACH if self.name == prefix or self.name.startswith(prefix)), START)

    @property
    def moves_data(self) -> bool:
        """Whether it can decide what a batch holds."""
        if self.name.startswith(_NOT_DATA):
            return self.name in ("config.model.ctx", "config.model.vocabulary")
        return self.reach in (START, BATCH)

    def __str__(self) -> str:
        return f"{self.name} ({shown(self.a)} against {shown(self.b)})"


def order(item: str) -> int:
    """The place of an item within a step; the start comes before all."""
    return -1 if item == START else ITEMS.index(item)


def shown(value: Any) -> str:
    text = "nothing" if value is None else value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}…"


def differing_settings(
    a: Manifest, b: Manifest, environments: Sequence[Mapping[str, Any]], folders: Sequence[str] = ("", "")
) -> list[Setting]:
    """Every setting in which two runs differ.

    For runs of the built-in trainer its config decides all the rest, so that what else differs is a consequence. For a
    loop of your own, what differs in the same way as an argument of its factory is one.

    Args:
        environments: numeric environments to compare: all that either run had, run a's first.
        folders: the names of the runs' folders: options of a script that only name them move no bit.
    """
    trainers = all(manifest.rebuild.get("kind") == "trainer" for manifest in (a, b))
    knobs = [*_rebuild(a, b, folders), *_data(a, b), *_of_fork(a, b)]
    sources = [one for one in knobs if one.kind == "knob"]
    implied = [(one.a, one.b) for one in sources]
    for name in ("options", "optimizer"):
        for path, left, right in _unequal({name: getattr(a, name)}, {name: getattr(b, name)}):
            derived = bool(sources) if trainers else (left, right) in implied
            knobs.append(Setting(path, "consequence" if derived else "knob", left, right))
    if not any(one.kind == "knob" and one.reach == START for one in knobs):
        knobs += [Setting("parameters", "knob", left, right) for left, right in _models(a, b)]
    rest = [Setting("workbench", "code", a.workbench, b.workbench)] if a.workbench != b.workbench else []
    rest += [
        Setting(name, "no effect", getattr(a, name), getattr(b, name))
        for name in _RECORDING
        if getattr(a, name) != getattr(b, name)
    ]
    first = {"environment": environments[0]}
    seen: dict[str, Setting] = {}
    for other in environments[1:]:
        for path, left, right in _unequal(first, {"environment": other}, strict=True):
            seen.setdefault(path, Setting(path, "environment", left, right))
    return [*knobs, *rest, *seen.values()]


def _rebuild(a: Manifest, b: Manifest, folders: Sequence[str]) -> Iterator[Setting]:
    for unlike in differing_scripts(a, b, folders):
        yield Setting(*unlike)  # type: ignore[arg-type]
    sides = [{key: value for key, value in one.rebuild.items() if key not in _ELSEWHERE} for one in (a, b)]
    for path, left, right in _unequal({"rebuild": sides[0]}, {"rebuild": sides[1]}):
        name = path.removeprefix("rebuild.") if path.startswith("rebuild.arg") else path
        yield Setting(name, "knob", left, right)
    configs = [{"config": one.rebuild["config"]} if "config" in one.rebuild else {} for one in (a, b)]
    for path, left, right in _unequal(configs[0], configs[1]):
        yield Setting(path, "no effect" if path in _HARMLESS else "knob", left, right)


def _of_fork(a: Manifest, b: Manifest) -> Iterator[Setting]:
    """What a fork of a loop of one's own noted, which stands nowhere else: a learning rate is seen in telemetry."""
    if any(one.rebuild.get("kind") == "trainer" for one in (a, b)):
        return
    forked = b.parent is not None and b.parent.run == a.run
    for name, _, value in (change.partition("=") for change in fork_changes(a, b)):
        if name != "lr":
            yield Setting(f"fork.{name}", "knob", *((None, value) if forked else (value, None)))


def _data(a: Manifest, b: Manifest) -> Iterator[Setting]:
    """Data files by content: where they lie moves no bit. Those after the first are what substitutions draw from."""
    substituted = [(one.rebuild.get("config") or {}).get("substitutions") for one in (a, b)]
    for number in range(max(len(a.data), len(b.data))):
        left, right = (one.data[number] if number < len(one.data) else None for one in (a, b))
        if left is not None and right is not None and (left.bytes, left.sha256) == (right.bytes, right.sha256):
            continue
        derived = number > 0 and substituted[0] != substituted[1]
        yield Setting(f"data.{number}", "consequence" if derived else "knob", _file(left), _file(right))


def _file(entry: DataFile | None) -> str | None:
    return None if entry is None else f"{entry.path.rpartition('/')[2]}, sha256 {entry.sha256[:12]}…"


def _models(a: Manifest, b: Manifest) -> Iterator[tuple[str, str]]:
    """What the first parameter to differ is, if the models differ."""
    sides = [[f"{p.path} {p.dtype}{p.shape}" for p in one.parameters] for one in (a, b)]
    for left, right in zip(*sides, strict=False):
        if left != right:
            yield left, right
            return
    if len(sides[0]) != len(sides[1]):
        yield f"{len(sides[0])} tensors", f"{len(sides[1])} tensors"


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any], strict: bool = False) -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ. One that only a side has counts unless it is empty, zero or off: an older manifest lacks what
    was added later, and such values stand for what it did. With `strict` it counts unless it is null."""
    left, right = dict(_leaves(a)), dict(_leaves(b))
    for path in dict.fromkeys((*left, *right)):
        ours, theirs = left.get(path), right.get(path)
        missing = path not in left or path not in right
        if ours == theirs and isinstance(ours, bool) == isinstance(theirs, bool):
            continue
        if missing and not strict and not (ours or theirs):
            continue
        yield path, ours, theirs


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every leaf; a list of plain values by position, any other list as a whole."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        elif isinstance(value, list) and value and not any(isinstance(item, (list, Mapping)) for item in value):
            yield from ((f"{path}.{number}", item) for number, item in enumerate(value))
        else:
            yield path, value
