"""An experiment that its owner handed in, and may be training at this moment: lent to a replay, and given back as it
was found.

Knows experiments and interrupts; nothing of run folders, recorders or what is done with it meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from .. import extras
from ..experiment import (
    Experiment,
    ensure_initialised,
    kept_arrays,
    put_arrays,
    put_kept,
    random_key,
    read_cursor,
    set_random_key,
    state_handles,
    weight_arrays,
)
from ..interrupts import Deferral
from ..plain_json import copied


@contextmanager
def left_as_found(experiment: Experiment | None) -> Iterator[None]:
    """Puts the state of an experiment back at the end, also after an error or an interrupt, which waits for it: the
    weights, the optimizer's state and `extra`, the very arrays that were there; the sampler's cursor; and this thread's
    random state.

    A replay puts other arrays in their place and changes none of them, so nothing is copied; but the state stays in
    memory beside those of the replay. Python state that no checkpoint holds is not put back.

    Args:
        experiment: None: there is none that belongs to somebody else.

    Raises:
        ExperimentError: the sampler's cursor is none.
    """
    if experiment is None:
        yield
        return
    ensure_initialised(experiment.optimizer, experiment.model)
    weights, kept = dict(weight_arrays(experiment)), dict(kept_arrays(experiment))
    # An object's own arrays may be changed in place when it loads another state; handles are not.
    kept |= {path: array for path, array in state_handles(experiment)[1].items() if extras.of_object(path)}
    cursor, key = read_cursor(experiment.sampler), random_key()
    try:
        yield
    finally:
        with Deferral(), ExitStack() as back:  # in reverse; each of them, also where another one fails
            back.callback(set_random_key, key)  # after the sampler, which may draw when it is positioned
            back.callback(put_kept, experiment, kept)
            back.callback(put_arrays, experiment.model, weights)
            back.callback(lambda: experiment.sampler.load_state_dict(copied(cursor)))
