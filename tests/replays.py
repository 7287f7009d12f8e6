"""Replays of a small experiment whose states and evidence are in memory."""

from helpers import assert_same_state, experiment

from workbench.replay import replay_steps

STEPS = 8


def outcomes(steps, *, job=None, start=None, evidence=None, memory=None, **options):
    states, recorded, layers = memory
    evidence = recorded if evidence is None else evidence
    return list(
        replay_steps(
            job or experiment(),
            states[0] if start is None else start,
            steps,
            lambda step: evidence.get(step, {}),
            layers=layers,
            **options,
        )
    )


def same_outcome(left, right):
    assert left.observation.evidence() == right.observation.evidence()
    assert left.items == right.items and left.rows == right.rows
    assert_same_state(left.after, right.after)
    assert_same_state(left.before, right.before)
