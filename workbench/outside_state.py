"""What a step can reach beside its state: arrays and plain values one by one, and everything as one deep snapshot.

Knows experiments; nothing of folders or recorders.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import mlx.nn as nn
import numpy as np

from .bare_objects import all_plain, attributes, is_a, items_of, module_of, name_of, order_of, plain_value
from .contents import RANDOM, Held
from .deep_snapshot import DeepSnapshot, opaque
from .experiment import Experiment, kept_arrays, state_arrays
from .object_graph import ours, walk
from .own_scripts.users_code import bare
from .reachable import Classes, Found, visit, visit_methods
from .step import optimizer_states


def outside(experiment: Experiment, also: tuple[type, ...] = ()) -> Iterator[Found]:
    """Arrays and plain values that a step can reach beside its state, each with path and place, and once; and the
    instances of the classes in `also`."""
    trained = {id(array) for array in state_arrays(experiment.model).values()}
    seen = set()
    for path, value, place in _reached(experiment, also):
        at = (path,) if place is None else (id(place.holder), plain_value(place.key))
        if id(value) not in trained and at not in seen:
            seen.add(at)
            yield path, value, place


def _reached(experiment: Experiment, also: tuple[type, ...]) -> Iterator[Found]:
    known, classes = known_to(experiment), Classes()
    yield from visit(experiment.model, "model", known_below_model(experiment), also, classes)
    for path, optimizer in _optimizers(experiment):
        yield from visit(attributes(optimizer), path, {id(optimizer.state)}, also, classes)
    for name, function in (("loss_fn", bare(experiment.loss_fn)), ("step_fn", bare(experiment.step_fn))):
        if function is not None:
            yield from visit(function, name, known, also, classes)
    for path, optimizer in _optimizers(experiment):
        for kind in order_of(type(optimizer)):
            if module_of(kind).startswith("mlx.") or ours(module_of(kind)):
                classes.setdefault(id(kind), (f"{path}.{name_of(kind)}", kind))
    yield from visit_methods(classes, known | {id(experiment.model)}, also)


def _optimizers(experiment: Experiment) -> Iterator[tuple[str, Any]]:
    members = getattr(experiment.optimizer, "optimizers", None)
    for number, optimizer in enumerate(members or [experiment.optimizer]):
        yield f"optimizer.optimizers[{number}]" if members else "optimizer", optimizer


def known_to(experiment: Experiment) -> set[int]:
    """Ids of what a checkpoint knows of, as a whole: it is not looked into as something beside the state."""
    own = [experiment.model, experiment.optimizer, experiment.optimizer.state, experiment.sampler]
    return {id(one) for one in (*own, experiment.extra, *experiment.extra.values())}


def known_below_model(experiment: Experiment) -> set[int]:
    """The same of what may hang on the model, such as an object in `extra`. A module there is looked into: what it
    holds beside its arrays is in no checkpoint."""
    modules = (experiment.model, *experiment.extra.values())
    return known_to(experiment) - {id(one) for one in modules if isinstance(one, nn.Module)}


def everything_outside(experiment: Experiment) -> DeepSnapshot:
    """All that a step can reach beside its state, as it is now."""
    state = {id(array) for array in (*state_arrays(experiment.model).values(), *kept_arrays(experiment).values())}
    skip = known_to(experiment) | {id(one) for one in optimizer_states(experiment.optimizer)}
    shared: list[Any] = [random.random, np.random.rand]  # bound methods of the process's: see `Generators`
    skip |= {id(one.__self__) for one in shared}
    members = [optimizer for _, optimizer in _optimizers(experiment)]
    skip -= {id(experiment.model), *map(id, members)}
    roots = [("model", experiment.model), *_optimizers(experiment)]
    roots += [("loss_fn", bare(experiment.loss_fn)), ("step_fn", bare(experiment.step_fn)), ("os.environ", os.environ)]
    return DeepSnapshot(roots, skip, state, set(containers(experiment)))


def containers(experiment: Experiment) -> Iterator[int]:
    """Ids of the dicts and lists that the state consists of."""
    todo = [experiment.model, experiment.optimizer.state, experiment.extra, *optimizer_states(experiment.optimizer)]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if is_a(one, (dict, list, tuple)) and id(one) not in seen:
            seen.add(id(one))
            yield id(one)
            todo += list(dict.values(one)) if is_a(one, dict) else items_of(one)


def of_sampler(experiment: Experiment) -> DeepSnapshot | None:
    """What the sampler holds beside what its cursor says; None if it holds something that can't be looked into, which
    its `load_state_dict` may put elsewhere."""
    sampler = experiment.sampler
    if any(opaque(edge.value) not in (None, "cache", "sink") for edge in walk([("sampler", sampler)], ())):
        return None
    skip = {id(experiment.model), id(experiment.optimizer), *map(id, experiment.extra.values())}
    return DeepSnapshot([("sampler", sampler)], skip)


def named(changed: list[Held], known: dict[str, Any]) -> list[str]:
    """Paths of what holds something else than it did, and what it is; without what is named already, item by item.

    Args:
        known: by path, the plain values and arrays that are others.
    """
    found: list[str] = []
    for one in changed:
        if one.kind.name == RANDOM or any(_within(path, one.path) for path in known):
            continue
        if one.kind.name in ("variables", "attributes", "dict"):
            names = _others(one)
            found += [name for name in names if not any(_within(path, name) for path in (*known, *found))]
        elif one.kind.name == "variable":
            found += [one.path] * (one.path not in found)
        else:
            found.append(f"{one.path} (a {one.kind.name})")
    return list(dict.fromkeys(found))


def _others(one: Held) -> list[str]:
    """The keys whose values are others, as paths; the whole, if it is not of text keys or some have come or gone."""
    before, after = one.then, one.kind.read(one.thing)
    if one.kind.name == "dict" and not all_plain(key for key, _ in (*before, *after)):
        return [f"{one.path} (a dict)"]
    then, now = dict(before), dict(after)
    keys = [key for key in {**then, **now} if key not in then or key not in now or not one.kind.same(
        [(key, then[key])], [(key, now[key])]
    )]  # fmt: skip
    if one.kind.name == "dict" and any(key not in then or key not in now or not is_a(key, str) for key in keys):
        return [f"{one.path} (a dict)"]
    return [f"{one.path}.{key}" for key in keys] or [f"{one.path} (the order of a dict)"]


def _within(path: str, whole: str) -> bool:
    return path == whole or path.startswith((f"{whole}.", f"{whole}["))
