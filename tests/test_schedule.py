import itertools
import math
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import msgspec
import numpy as np
import pytest

from workbench.errors import ExperimentError
from workbench.trainer.schedule import MAX_STEPS, RateChange, ScheduleConfig, lr_at, make_schedule

STEPS = 100
CONFIGS = [
    ScheduleConfig(
        kind=kind, steps=STEPS, warmup=warmup, max_lr=3e-4, min_lr=min_lr, decay_steps=decay, decay_shape=shape
    )
    for kind, warmup, min_lr, decay, shape in [
        ("constant", 0, 0.0, None, "1-sqrt"),
        ("constant", 7, 0.0, None, "1-sqrt"),
        ("cosine", 0, 0.0, None, "1-sqrt"),
        ("cosine", 7, 3e-5, None, "1-sqrt"),
        ("cosine", 99, 0.0, None, "1-sqrt"),
        *itertools.product(["wsd"], [0, 7], [0.0, 3e-5], [None], ["1-sqrt", "cosine", "linear"]),
        ("wsd", 7, 0.0, 93, "1-sqrt"),
        ("wsd", 0, 0.0, 1, "linear"),
    ]
]

# Relative. The MLX schedule is about ten float32 operations (half an ulp, 6e-8, each); the twin is double precision.
FLOAT32_ROUNDING = 6e-7


@pytest.fixture(autouse=True)
def on_cpu():
    """Bitwise claims about compiled code hold on the CPU backend; a GPU's compiler may contract multiply and add."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


def rates(config: ScheduleConfig, steps: int) -> np.ndarray:
    """(steps,) float32: the rate of steps 1 … steps, one call each as an optimizer makes them."""
    schedule = make_schedule(config)
    return np.array(mx.stack([schedule(mx.array(n, mx.uint64)) for n in range(steps)]))


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_mlx_schedule_equals_the_python_twin_at_every_step(config):
    found = rates(config, STEPS + 20)
    expected = [lr_at(config, step) for step in range(1, STEPS + 21)]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=FLOAT32_ROUNDING, atol=0)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_phases(config):
    found = rates(config, STEPS + 20)
    maximum, minimum = np.float32(config.max_lr), np.float32(config.min_lr)
    warmup, after = found[: config.warmup], found[STEPS:]
    assert found[0] > 0
    assert (np.diff(warmup) > 0).all()
    assert found[max(config.warmup - 1, 0)] == maximum  # the last step of the warm-up, or the first of all
    assert (np.diff(found[config.warmup :]) <= 0).all()
    if config.kind == "constant":
        assert (found[config.warmup :] == maximum).all()
    else:
        assert (after == minimum).all()
        assert found[STEPS - 1] > minimum  # no update of the run is spent on the final rate


def test_warmup_is_linear_from_one_part_in_w():
    config = ScheduleConfig(kind="constant", steps=10, warmup=4, max_lr=1.0)
    assert [lr_at(config, step) for step in range(1, 6)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_wsd_decay_by_hand():
    config = ScheduleConfig(kind="wsd", steps=20, max_lr=1.0, min_lr=0.2, decay_steps=4)
    assert [lr_at(config, step) for step in (1, 16, 17)] == [1.0, 1.0, 1.0]
    assert lr_at(config, 18) == pytest.approx(0.2 + 0.8 * (1 - math.sqrt(1 / 4)))
    assert lr_at(config, 20) == pytest.approx(0.2 + 0.8 * (1 - math.sqrt(3 / 4)))
    assert lr_at(config, 21) == 0.2
    linear = msgspec.structs.replace(config, decay_shape="linear")
    assert lr_at(linear, 19) == pytest.approx(0.6)


def test_cosine_is_halfway_in_the_middle():
    config = ScheduleConfig(kind="cosine", steps=110, warmup=10, max_lr=1.0, min_lr=0.5)
    assert lr_at(config, 61) == pytest.approx(0.75)


def test_wsd_decays_over_the_last_fifth_by_default():
    config = ScheduleConfig(kind="wsd", steps=50, max_lr=1.0)
    assert [lr_at(config, step) == 1.0 for step in (40, 41, 42)] == [True, True, False]


def test_longest_run_keeps_every_step_apart():
    config = ScheduleConfig(kind="wsd", steps=MAX_STEPS, decay_shape="linear")
    schedule = make_schedule(config)
    for step in (MAX_STEPS - 1, MAX_STEPS, MAX_STEPS + 1, MAX_STEPS + 2):
        found = schedule(mx.array(step - 1, mx.uint64)).item()
        assert found == pytest.approx(lr_at(config, step), rel=FLOAT32_ROUNDING, abs=0)
    assert schedule(mx.array(MAX_STEPS - 2, mx.uint64)).item() > schedule(mx.array(MAX_STEPS - 1, mx.uint64)).item() > 0
    assert schedule(mx.array(2**60, mx.uint64)).item() == 0


@pytest.mark.parametrize(
    "config",
    [
        ScheduleConfig(kind="cosine", steps=12, warmup=3, min_lr=1e-4),
        ScheduleConfig(kind="wsd", steps=12, warmup=3, decay_steps=6),
        ScheduleConfig(kind="constant", steps=12),
    ],
    ids=["cosine", "wsd", "constant"],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_optimizer_state_holds_the_rate_of_the_update_just_made(config, compiled):
    """Step N uses lr_at(config, N), bit for bit the schedule at N - 1, eager and compiled; 15 steps pass the end."""
    model = nn.Linear(2, 1)
    optimizer = optim.AdamW(learning_rate=make_schedule(config))
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    def step():
        optimizer.update(model, {"weight": mx.ones((1, 2)), "bias": mx.ones((1,))})

    if compiled:
        step = partial(mx.compile, inputs=state, outputs=state)(step)
    eager_rates = rates(config, 15)
    for number in range(1, 16):
        step()
        rate = optimizer.state["learning_rate"]
        assert optimizer.state["step"].item() == number
        assert rate.dtype == mx.float32 and rate.shape == ()
        assert rate.item() == eager_rates[number - 1]
        assert rate.item() == pytest.approx(lr_at(config, number), rel=FLOAT32_ROUNDING, abs=0)


def test_config_survives_json():
    config = CONFIGS[-1]
    assert msgspec.json.decode(msgspec.json.encode(config), type=ScheduleConfig) == config
    with pytest.raises(msgspec.ValidationError, match="warm_up"):
        msgspec.json.decode(b'{"steps": 5, "warm_up": 1}', type=ScheduleConfig)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "step"}, "schedule.kind is 'step'; expected one of cosine, wsd, constant"),
        ({"decay_shape": "sqrt"}, "schedule.decay_shape is 'sqrt'; expected one of 1-sqrt, cosine, linear"),
        ({"steps": 0}, "schedule.steps is 0; expected a whole number of updates from 1 to 16777216"),
        ({"steps": MAX_STEPS + 1}, "schedule.steps is 16777217; expected a whole number of updates from 1 to"),
        ({"steps": 10.0}, "schedule.steps is 10.0; expected a whole number"),
        ({"warmup": -1}, "schedule.warmup is -1; expected a whole number of updates from 0"),
        ({"decay_steps": 0}, "schedule.decay_steps is 0; expected a whole number of updates from 1"),
        ({"max_lr": 0.0}, "schedule.max_lr is 0.0; expected a finite rate above 0"),
        ({"max_lr": math.nan}, "schedule.max_lr is nan; expected a finite rate"),
        ({"max_lr": math.inf}, "schedule.max_lr is inf; expected a finite rate"),
        ({"min_lr": 1.0}, "schedule.min_lr is 1.0; expected a rate from 0 to schedule.max_lr = 0.001"),
        ({"min_lr": math.nan}, "schedule.min_lr is nan; expected a rate from 0"),
        ({"warmup": 10}, r"schedule.steps is 10, but warm-up \(10\) and decay \(1 or more\) need 11; shorten"),
        ({"kind": "constant", "warmup": 11}, r"schedule.steps is 10, but warm-up \(11\) and decay \(0 or more\) need"),
        ({"kind": "wsd", "warmup": 5, "decay_steps": 6}, r"warm-up \(5\) and decay \(6 or more\) need 11"),
    ],
)
def test_bad_settings_get_a_sentence(settings, sentence):
    with pytest.raises(ExperimentError, match=sentence):
        ScheduleConfig(**{"steps": 10, **settings})


def test_step_zero_has_no_rate():
    with pytest.raises(ExperimentError, match="step 0 has no learning rate; steps count updates from 1"):
        lr_at(ScheduleConfig(steps=10), 0)


# ------------------------------------------------------------------------------------------------------------- changes


@pytest.mark.parametrize("config", CONFIGS[2:9], ids=repr)
def test_changes_hold_from_their_first_step_to_their_last(config):
    plain = [lr_at(config, step) for step in range(1, STEPS + 21)]
    changes = (
        RateChange(step=11, factor=30.0, until=11),
        RateChange(step=20, factor=0.5),
        RateChange(step=40, rate=1e-5, until=44),
        RateChange(step=43, factor=2.0, until=43),
    )
    changed = msgspec.structs.replace(config, changes=changes)

    def expected(step):
        rate = plain[step - 1] * (30 if step == 11 else 1) * (0.5 if step >= 20 else 1)
        rate = 1e-5 if 40 <= step <= 44 else rate
        return rate * (2 if step == 43 else 1)

    wanted = [expected(step) for step in range(1, STEPS + 21)]
    assert [lr_at(changed, step) for step in range(1, STEPS + 21)] == pytest.approx(wanted, rel=1e-15)
    np.testing.assert_allclose(rates(changed, STEPS + 20), wanted, rtol=FLOAT32_ROUNDING, atol=0)
    untouched = [step - 1 for step in range(1, 20) if step != 11]
    assert np.array_equal(rates(changed, STEPS)[untouched], rates(config, STEPS)[untouched])


def test_a_changed_schedule_round_trips_and_an_old_manifest_has_none():
    config = ScheduleConfig(steps=10, changes=(RateChange(step=3, factor=2.0), RateChange(step=5, rate=0.0, until=6)))
    assert msgspec.json.decode(msgspec.json.encode(config), type=ScheduleConfig) == config
    assert msgspec.convert({"steps": 10}, ScheduleConfig).changes == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 0, "factor": 1.0}, ("step 0", "from 1")),
        ({"step": True, "factor": 1.0}, ("step True",)),
        ({"step": 5, "until": 4, "factor": 1.0}, ("until 4", "that step or a later")),
        ({"step": 5}, ("None", "one of them")),
        ({"step": 5, "factor": 1.0, "rate": 1.0}, ("1.0", "one of them")),
        ({"step": 5, "factor": -1.0}, ("-1.0", "from 0")),
        ({"step": 5, "rate": math.inf}, ("inf",)),
        ({"step": 5, "factor": math.nan}, ("nan",)),
        ({"step": 5, "factor": "2"}, ("'2'",)),
    ],
)
def test_changes_that_can_not_be_are_named(change, words):
    with pytest.raises(ExperimentError) as caught:
        RateChange(**change)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
