"""A Ctrl-C at each place of the recorder where Python runs a signal's handler: the run stays whole.

The suite tries one place in PITCH of each call; all of them: python tests/test_cut_off_anywhere.py (some minutes).
"""

import opcode
import sys
import warnings
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from helpers import mlp, mse

import workbench as wb

STEPS, AT, PITCH = 9, 6, 150
PACKAGE = Path(wb.__file__).parent
OWN = (str(PACKAGE / "record.py"), str(PACKAGE / "recording"), str(PACKAGE / "interrupts.py"))
# After these Python looks whether a signal has come.
LOOKS = {opcode.opmap.get(name) for name in ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD")}


class Interruption:
    """Counts the places in the block, and raises at one of them; 0: at none."""

    def __init__(self, place=0):
        self.place, self.passed = place, 0

    def __enter__(self):
        sys.settrace(self._enter)

    def __exit__(self, *error):
        sys.settrace(None)

    def _enter(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(OWN):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines, before = True, False, None

        def trace(frame, event, _):
            nonlocal before
            if event == "opcode":
                last, before = before, frame.f_code.co_code[frame.f_lasti]
                self.passed += last in LOOKS
                if last in LOOKS and self.passed == self.place:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        return trace


def build():
    return wb.Experiment(mlp(0.2), optim.AdamW(1e-2), mse, None, wb.StepOptions(compile=False))


def batches():
    inputs = [mx.random.normal((6, 4), key=mx.random.key(number)) for number in range(STEPS)]
    return [(one, one.sum(axis=1, keepdims=True)) for one in inputs]


CALLS = {
    "step": lambda recorder, batch: recorder.step(batch),
    "step after a change": lambda recorder, batch: (halve(recorder), recorder.step(batch)),
    "open_segment": lambda recorder, _: recorder.open_segment(),
    "checkpoint": lambda recorder, _: recorder.checkpoint(),
    "log_validation": lambda recorder, _: recorder.log_validation(0.5),
}


def halve(recorder):
    weights = recorder.experiment.model.layers[0]
    weights.weight = weights.weight / 2


def places(path, call, place=0):
    """Records a loop that goes on after a Ctrl-C at a place of the call. Returns how many places there were."""
    job, interruption = build(), Interruption(place)
    options = {"save_every": 3, "black_box": 2, "compile": False, "self_check": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder = wb.Recorder(path, job.model, job.optimizer, mse, **options)
        for number, batch in enumerate(batches(), 1):
            try:
                with interruption if number == AT else warnings.catch_warnings():
                    (CALLS[call] if number == AT else CALLS["step"])(recorder, batch)
            except KeyboardInterrupt:
                assert number == AT
        recorder.close()
    assert interruption.passed == place or not place
    found = wb.open_run(path).verify(replay=STEPS, experiment=build())
    assert found.whole, found.sentence()
    return interruption.passed


def each(folder, call, pitch):
    every = places(folder / "0", call)
    for place in range(1 + pitch // 2, every + 1, pitch):
        places(folder / str(place), call, place)
    return every


@pytest.mark.parametrize("call", CALLS)
def test_a_ctrl_c_anywhere_leaves_a_whole_run(tmp_path, call):
    assert each(tmp_path, call, PITCH) > 5


if __name__ == "__main__":
    import tempfile

    for name in CALLS:
        with tempfile.TemporaryDirectory() as folder:
            print(name, each(Path(folder), name, 1), "places", flush=True)
