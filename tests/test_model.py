import hashlib
import math

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from workbench.errors import ExperimentError
from workbench.trainer.model import (
    INIT_STD,
    PRESETS,
    ModelConfig,
    Transformer,
    _normal,
    build_model,
    depth_config,
    generate,
    init_weights,
    loss,
    masked_loss,
    parameter_count,
    parameter_shapes,
    token_losses,
)

SMALL = {"vocabulary": 17, "ctx": 12, "depth": 2, "width": 24, "heads": 3}  # head size 8, MLP 96

# Max abs difference of logits of size about 5. float32 rounds at 2^-24 = 6e-8 relative, the longest sum has 96 terms,
# and a few dozen roundings follow one another: measured 7e-6. Without positions or without a mask it is above 3.
FORWARD_TOLERANCE = 5e-5


@pytest.fixture(autouse=True)
def on_cpu():
    """The tolerances are those of float32 sums on the CPU backend; CUDA multiplies in TF32 unless told otherwise."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


def parameters(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def bits(model: nn.Module) -> dict[str, bytes]:
    return {path: bytes(memoryview(weight.view(mx.uint8))) for path, weight in parameters(model).items()}


def random_tokens(shape: tuple[int, ...], vocabulary: int = SMALL["vocabulary"], seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).integers(0, vocabulary, shape))


def strong_model(**settings) -> Transformer:
    """A model whose weights are ten times the initial size: attention is far from uniform, norms differ from 1."""
    model = build_model(ModelConfig(**{**SMALL, **settings}), 0)
    draw = np.random.default_rng(1)
    weights = [
        (path, mx.array(draw.normal(1 if weight.ndim == 1 else 0, 0.3, weight.shape), mx.float32))
        for path, weight in parameters(model).items()
    ]
    model.update(tree_unflatten(weights))
    return model


# --- an independent forward pass: numpy, double precision, loops where MLX has kernels


def reference_forward(
    weights: dict[str, np.ndarray],
    tokens: np.ndarray,
    *,
    depth: int,
    heads: int,
    causal: bool = True,
    rope: bool = True,
) -> np.ndarray:
    """(T,) tokens -> (T, vocabulary) float64 logits."""
    x = weights["embedding.weight"][tokens]
    for i in range(depth):
        w = {path.removeprefix(f"blocks.{i}."): weight for path, weight in weights.items()}
        normed = rms_norm(x, w["attention_norm.weight"])
        query, key, value = (normed @ w[f"attention.{name}.weight"].T for name in ("query", "key", "value"))
        size = x.shape[1] // heads
        mixed = np.zeros_like(x)
        for head in range(heads):
            columns = slice(head * size, (head + 1) * size)
            q, k = (rotate(part[:, columns]) if rope else part[:, columns] for part in (query, key))
            for t in range(len(tokens)):
                seen = t + 1 if causal else len(tokens)
                score = np.exp(k[:seen] @ q[t] / math.sqrt(size))
                mixed[t, columns] = (score / score.sum()) @ value[:seen, columns]
        x = x + mixed @ w["attention.output.weight"].T
        hidden = rms_norm(x, w["mlp_norm.weight"]) @ w["mlp.up.weight"].T
        gelu = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
        x = x + gelu @ w["mlp.down.weight"].T
    return rms_norm(x, weights["norm.weight"]) @ weights.get("head.weight", weights["embedding.weight"]).T


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * weight


def rotate(x: np.ndarray) -> np.ndarray:
    """RoPE on (T, size): components i and i + size/2 turn as a complex number by t · 10000^(-2i/size)."""
    half = x.shape[1] // 2
    angle = np.outer(np.arange(len(x)), 10000.0 ** (-np.arange(half) / half))
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=1)


@pytest.mark.parametrize("settings", [{}, {"tied": False}, {"mlp": 2, "heads": 1, "depth": 1}], ids=repr)
def test_forward_equals_reference(settings):
    model = strong_model(**settings)
    config = model.config
    tokens = random_tokens((3, 11))
    logits = model(tokens)
    assert logits.shape == (3, 11, config.vocabulary) and logits.dtype == mx.float32
    weights = {path: np.array(weight, np.float64) for path, weight in parameters(model).items()}

    def distance(**changes) -> float:
        rows = [
            reference_forward(weights, row, depth=config.depth, heads=config.heads, **changes)
            for row in np.array(tokens)
        ]
        return np.abs(np.array(logits) - np.stack(rows)).max()

    assert distance() < FORWARD_TOLERANCE
    # The comparison can fail: it notices missing positions and a missing mask.
    assert distance(rope=False) > 1
    assert distance(causal=False) > 1


def test_later_tokens_leave_earlier_logits_bit_identical():
    model = strong_model()
    tokens = np.array(random_tokens((1, 12)))
    before = np.array(model(mx.array(tokens)))
    for t in range(12):
        changed = tokens.copy()
        changed[0, t] = (changed[0, t] + 1) % SMALL["vocabulary"]
        after = np.array(model(mx.array(changed)))
        assert (after[0, :t] == before[0, :t]).all()
        assert (after[0, t] != before[0, t]).any()


# --- initial weights


def test_initial_weights_depend_on_the_seed_alone():
    config = ModelConfig(**SMALL)
    mx.random.seed(1)
    first = bits(build_model(config, 7))
    mx.random.seed(2)
    model = build_model(config, 7)
    assert bits(model) == first
    assert bits(build_model(config, 8)) != first
    init_weights(model, 8)
    assert bits(model) == bits(build_model(config, 8))


def test_a_weight_depends_on_its_own_path_and_shape():
    tied = bits(build_model(ModelConfig(**SMALL), 7))
    untied = bits(build_model(ModelConfig(**SMALL, tied=False, dropout=0.1), 7))
    assert {path: untied[path] for path in tied} == tied
    assert untied.keys() - tied.keys() == {"head.weight"}
    assert untied["head.weight"] != untied["embedding.weight"]


def test_building_leaves_the_global_random_state():
    mx.random.seed((5 << 32) | 6)
    build_model(ModelConfig(**SMALL), 0)
    assert mx.random.state[0].tolist() == [5, 6]


def test_initial_weights_are_the_same_bits_on_every_machine():
    model = bits(build_model(ModelConfig(**SMALL), 2**64 - 1))
    digest = hashlib.sha256(b"".join(weights for _, weights in sorted(model.items()))).hexdigest()
    assert digest == "8882e3d211e6a38037e0d2e644cca02ff96329627e9a50b302e57b92740214f0"


def test_initial_draws_are_centred_sums_of_twelve_integers():
    """In a tensor of more than one stretch, against plain arithmetic on the same stream."""
    shape, std = (300, 231), 0.02
    key = int.from_bytes(hashlib.sha256(b"some.path").digest()[:8], "big") << 64 | 7
    words = np.random.Philox(key=key).random_raw(3 * 300 * 231).reshape(3, -1)
    sums = sum((words >> np.uint64(shift)) % np.uint64(65536) for shift in (0, 16, 32, 48)).sum(0)
    expected = (sums.astype(np.float64) - 6 * 65535) * (std / math.sqrt(2**32 - 1))
    assert _normal(7, "some.path", shape, std).tobytes() == expected.astype(np.float32).tobytes()


def test_initial_distribution():
    model = build_model(ModelConfig(vocabulary=256, ctx=8, depth=8, width=128, heads=4), 3)
    for path, weight in parameters(model).items():
        values = np.array(weight)
        if values.ndim == 1:
            assert (values == 1).all(), path
            continue
        residual = path.endswith(("attention.output.weight", "mlp.down.weight"))
        std = INIT_STD / 4 if residual else INIT_STD  # 1 / sqrt(2 · 8) = 1/4
        normal = values / std
        error = 5 / math.sqrt(values.size)  # five standard errors
        assert abs(normal.mean()) < error, path
        assert abs(normal.std() - 1) < error, path
        assert 3.3 < np.abs(normal).max() < 6, path
        assert abs((np.abs(normal) < 1).mean() - 0.6827) < error + 0.01, path  # 0.01: a sum of 12 is not quite normal
    flat = np.array(model.embedding.weight).ravel()
    assert abs(np.corrcoef(flat[:-1], flat[1:])[0, 1]) < 5 / math.sqrt(flat.size)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_of_every_parameter_and_of_the_logits(dtype):
    expected = getattr(mx, dtype)
    model = build_model(ModelConfig(**SMALL, dtype=dtype, tied=False), 0)
    single = build_model(ModelConfig(**SMALL, tied=False), 0)
    for path, weight in parameters(model).items():
        assert weight.dtype == expected, path
        assert mx.array_equal(weight, parameters(single)[path].astype(expected)), path
    tokens = random_tokens((2, 5))
    assert model(tokens).dtype == expected
    assert token_losses(model, tokens, tokens).dtype == mx.float32
    value, _ = loss(model, tokens, tokens)
    assert value.dtype == mx.float32


# --- names and sizes


def test_parameter_paths():
    block = [
        "attention_norm",
        *[f"attention.{name}" for name in ("query", "key", "value", "output")],
        "mlp_norm",
        "mlp.up",
        "mlp.down",
    ]
    expected = {"embedding.weight", "norm.weight"} | {f"blocks.{i}.{name}.weight" for i in range(2) for name in block}
    assert parameters(build_model(ModelConfig(**SMALL), 0)).keys() == expected
    assert parameters(build_model(ModelConfig(**SMALL, tied=False), 0)).keys() == expected | {"head.weight"}


@pytest.mark.parametrize("settings", [{}, {"tied": False}, {"mlp": 1, "depth": 3}], ids=repr)
def test_parameter_count_is_that_of_the_model(settings):
    config = ModelConfig(**{**SMALL, **settings})
    weights = parameters(Transformer(config))  # lazy: nothing is drawn
    assert parameter_count(config) == sum(weight.size for weight in weights.values())


@pytest.mark.parametrize(
    ("name", "count", "tokens"),
    [("tiny", 115_008, 400), ("small", 10_720_128, 1024), ("huge", 22_026_496, 1024), ("xl", 1_310_986_240, 8192)],
)
def test_presets(name, count, tokens):
    config = ModelConfig(**PRESETS[name]["model"])
    assert parameter_count(config) == count
    assert PRESETS[name]["batch"] * config.ctx == tokens
    assert sum(weight.size for weight in parameters(Transformer(config)).values()) == count  # lazy: nothing is drawn


def test_depth_sets_the_size():
    config = depth_config(3, vocabulary=100, ctx=64, tied=False)
    assert (config.depth, config.width, config.heads, config.mlp) == (3, 192, 3, 4)
    assert (config.vocabulary, config.ctx, config.tied) == (100, 64, False)


# --- randomness in the forward pass


def test_without_dropout_nothing_is_drawn():
    model = build_model(ModelConfig(**SMALL), 0)
    tokens = random_tokens((2, 6))
    before = mx.random.state[0].tolist()
    mx.eval(nn.value_and_grad(model, lambda *args: loss(*args)[0])(model, tokens, tokens))
    assert mx.random.state[0].tolist() == before


def test_dropout_draws_in_training_only():
    model = build_model(ModelConfig(**SMALL, dropout=0.5), 0)
    plain = build_model(ModelConfig(**SMALL), 0)
    tokens = random_tokens((2, 6))
    before = mx.random.state[0].tolist()
    model.eval()
    assert mx.array_equal(model(tokens), plain(tokens))
    assert mx.random.state[0].tolist() == before
    model.train()
    mx.random.seed(3)
    first, second = model(tokens), model(tokens)
    assert not mx.array_equal(first, second)
    mx.random.seed(3)
    assert mx.array_equal(model(tokens), first)


def test_dropout_is_at_the_embedding_and_at_both_branches_of_each_block():
    model = build_model(ModelConfig(**SMALL, dropout=0.1), 0)
    mx.random.seed(3)
    key = mx.random.key(3)
    model(random_tokens((2, 6)))
    for _ in range(1 + 2 * SMALL["depth"]):
        key, _ = mx.random.split(key)  # what one draw does to the global state
    assert mx.random.state[0].tolist() == key.tolist()


# --- loss


def test_token_losses_equal_reference():
    model = strong_model()
    inputs, targets = random_tokens((3, 7)), random_tokens((3, 7), seed=2)
    logits = np.array(model(inputs), np.float64)
    log_sum = np.log(np.exp(logits).sum(axis=-1))
    expected = log_sum - np.take_along_axis(logits, np.array(targets)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(np.array(token_losses(model, inputs, targets)), expected, atol=5e-6)


def test_loss_is_the_mean_of_the_token_losses():
    model = strong_model()
    inputs, targets = random_tokens((3, 7)), random_tokens((3, 7), seed=2)
    value, extras = loss(model, inputs, targets)
    assert value.shape == ()
    assert extras.keys() == {"token_loss"} and extras["token_loss"].shape == (3, 7)
    assert mx.array_equal(extras["token_loss"], token_losses(model, inputs, targets))
    assert value.item() == mx.mean(extras["token_loss"]).item()


def test_first_loss_is_that_of_guessing():
    model = build_model(ModelConfig(**PRESETS["tiny"]["model"]), 0)
    tokens = random_tokens((4, 50), vocabulary=256)
    assert loss(model, tokens[:, :-1], tokens[:, 1:])[0].item() == pytest.approx(math.log(256), abs=0.05)


# --- sampling


def test_generate_repeats_and_disturbs_nothing():
    model = strong_model(dropout=0.5)
    model.blocks[1].mlp.eval()  # a mixed state, as a user may have set it
    modes = [module.training for module in model.modules()]
    weights = bits(model)
    mx.random.seed((8 << 32) | 9)
    first = generate(model, [1, 2, 3], 20, temperature=1.0, key=mx.random.key(4))
    assert len(first) == 20 and all(type(token) is int and 0 <= token < 17 for token in first)
    assert generate(model, [1, 2, 3], 20, temperature=1.0, key=mx.random.key(4)) == first
    assert generate(model, [1, 2, 3], 20, temperature=1.0, key=mx.random.key(5)) != first
    assert mx.random.state[0].tolist() == [8, 9]
    assert [module.training for module in model.modules()] == modes and True in modes and False in modes
    assert bits(model) == weights


def test_generate_restores_the_training_flag_after_an_error(monkeypatch):
    model = build_model(ModelConfig(**SMALL), 0)

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(model, [1], 1, temperature=0, key=mx.random.key(0))
    assert all(module.training for module in model.modules())


def test_temperature_zero_takes_the_most_likely_token_of_the_last_ctx():
    model = strong_model(dropout=0.5)
    tokens = list(range(10))
    found = generate(model, tokens, 6, temperature=0, key=mx.random.key(0))
    model.eval()
    for token in found:
        assert token == mx.argmax(model(mx.array([tokens[-12:]]))[0, -1]).item()
        tokens.append(token)


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_sampling_follows_the_model(temperature):
    model = build_model(ModelConfig(**{**SMALL, "vocabulary": 4}), 0)
    model.norm.weight = mx.full(model.norm.weight.shape, 12.0)  # logits that differ by about one
    share = np.array(mx.softmax(model(mx.array([[2]]))[0, -1] / temperature))
    keys = mx.random.split(mx.random.key(1), 400)
    drawn = [generate(model, [2], 1, temperature=temperature, key=key)[0] for key in keys]
    found = np.bincount(drawn, minlength=4) / 400
    assert np.abs(found - share).max() < 4 * 0.5 / math.sqrt(400)  # four standard errors at most
    assert share.max() - share.min() > 0.1


# --- bad input


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"vocabulary": 0}, "model.vocabulary is 0; expected a whole number of at least 1"),
        ({"depth": -1}, "model.depth is -1; expected a whole number of at least 1"),
        ({"ctx": 2.5}, "model.ctx is 2.5; expected a whole number of at least 1"),
        ({"heads": True}, "model.heads is True; expected a whole number"),
        ({"heads": 5}, "model.width is 24, which 5 heads cannot share equally; expected a multiple of model.heads"),
        (
            {"heads": 8},
            "model.width 24 over 8 heads makes heads of odd size 3, but RoPE .* a multiple of 16 as the width",
        ),
        ({"dropout": 1.0}, "model.dropout is 1.0; expected a probability of at least 0 and below 1"),
        ({"dropout": -0.1}, "model.dropout is -0.1; expected a probability"),
        ({"dropout": math.nan}, "model.dropout is nan; expected a probability"),
        ({"tied": "no"}, "model.tied is 'no'; expected true or false"),
        ({"dtype": "float64"}, "model.dtype is 'float64'; expected one of float32, bfloat16, float16"),
    ],
)
def test_bad_settings_get_a_sentence(settings, sentence):
    with pytest.raises(ExperimentError, match=sentence):
        ModelConfig(**{**SMALL, **settings})


def test_config_survives_json_and_is_checked_there():
    config = ModelConfig(**SMALL, dropout=0.1, tied=False, dtype="bfloat16")
    assert msgspec.json.decode(msgspec.json.encode(config), type=ModelConfig) == config
    with pytest.raises(ExperimentError, match="model.heads is 0"):
        msgspec.convert({**SMALL, "heads": 0}, ModelConfig)
    with pytest.raises(msgspec.ValidationError, match="layers"):
        msgspec.convert({**SMALL, "layers": 2}, ModelConfig)


@pytest.mark.parametrize("shape", [(5,), (1, 13), (1, 2, 3)])
def test_bad_token_shapes_get_a_sentence(shape):
    model = build_model(ModelConfig(**SMALL), 0)
    with pytest.raises(
        ExperimentError, match=r"the model got tokens of shape .*; expected \(batch, length\) .*ctx = 12"
    ):
        model(mx.zeros(shape, mx.int32))


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, None])
def test_bad_seeds_get_a_sentence(seed):
    with pytest.raises(ExperimentError, match=r"the seed is .*; expected a whole number from 0 to 2\^64 - 1"):
        build_model(ModelConfig(**SMALL), seed)


@pytest.mark.parametrize(
    ("tokens", "count", "temperature", "sentence"),
    [
        ([], 1, 1.0, "there is nothing to continue; expected at least one token"),
        ([3, 17], 1, 1.0, "token 17 is outside the model's vocabulary; expected 0 to 16"),
        ([-1], 1, 1.0, "token -1 is outside"),
        ([3], -1, 1.0, "the count is -1; expected the number of tokens"),
        ([3], 1, -1.0, "the temperature is -1.0; expected a finite number of at least 0"),
        ([3], 1, math.nan, "the temperature is nan"),
    ],
)
def test_bad_sampling_requests_get_a_sentence(tokens, count, temperature, sentence):
    model = build_model(ModelConfig(**SMALL), 0)
    with pytest.raises(ExperimentError, match=sentence):
        generate(model, tokens, count, temperature=temperature, key=mx.random.key(0))


# ------------------------------------------------------------------------------------------------------- masked targets


def test_masked_loss_is_the_mean_of_the_targets_that_count():
    model, tokens = strong_model(), random_tokens((3, 9))
    targets = np.array(random_tokens((3, 9), seed=1))
    ignored = np.random.default_rng(2).random((3, 9)) < 0.4
    found, extras = masked_loss(model, tokens, mx.array(np.where(ignored, -1, targets)))
    every = np.array(token_losses(model, tokens, mx.array(targets)))
    assert found.item() == pytest.approx(every[~ignored].mean(dtype=np.float64), rel=1e-6)
    assert np.array_equal(np.array(extras["token_loss"]), np.where(ignored, 0, every))


def test_ignored_targets_have_no_gradient():
    model, tokens = strong_model(), random_tokens((2, 9))
    targets = np.array(random_tokens((2, 9), seed=1))
    targets[1] = -1

    def gradient(*batch):
        return dict(tree_flatten(nn.value_and_grad(model, masked_loss)(model, *batch)[1]))

    both, alone = gradient(tokens, mx.array(targets)), gradient(tokens[:1], mx.array(targets[:1]))
    for path in alone:
        np.testing.assert_allclose(np.array(both[path]), np.array(alone[path]), rtol=1e-4, atol=1e-6)


def test_where_no_target_counts_loss_and_gradients_are_nan():
    model, tokens = build_model(ModelConfig(**SMALL), 0), random_tokens((2, 9))
    (found, _), gradients = nn.value_and_grad(model, masked_loss)(model, tokens, mx.full((2, 9), -1, mx.int32))
    assert math.isnan(found.item())
    assert all(np.isnan(np.array(gradient)).all() for _, gradient in tree_flatten(gradients) if gradient.ndim == 1)


@pytest.mark.parametrize("tied", [True, False])
def test_parameter_shapes_are_those_of_the_model(tied):
    config = ModelConfig(**SMALL, tied=tied, mlp=3)
    shapes = {path: weight.shape for path, weight in parameters(Transformer(config)).items()}
    assert parameter_shapes(config) == shapes
    assert sum(math.prod(shape) for shape in shapes.values()) == parameter_count(config)
