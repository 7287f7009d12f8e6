"""What the doctor says of what it found: the sentence, and advice on speed."""

from planted_operations import TEST

from workbench.examination import conclusion
from workbench.examination.diagnosis import OperationRow, StepRow
from workbench.examination.speed import advice


def step_rows(varies):
    """All eight settings; those for which `varies(dtype, compile, deterministic)` have three results."""
    return [
        StepRow(dtype, compiled, det, 4, 3, 2, 3 if varies(dtype, compiled, det) else 1)
        for dtype in ("float32", "bfloat16")
        for compiled in (False, True)
        for det in (True, False)
    ]


def operation_rows(**distinct):
    """`embedding_gradient_float32=6`, and the deterministic variants, which have one result."""
    rows = []
    for name, count in distinct.items():
        words, _, dtype = name.rpartition("_")
        rows.append(OperationRow(words.replace("_", " "), dtype, 8, count, None))
        if words in ("embedding_gradient", "attention_backward"):
            rows.append(OperationRow(f"{words.replace('_', ' ')} (deterministic)", dtype, 8, 1, None))
    return rows


CUDA = operation_rows(
    embedding_gradient_float32=6,
    embedding_gradient_bfloat16=6,
    pooling_float32=2,
    pooling_bfloat16=1,
    attention_backward_float32=1,
    attention_backward_bfloat16=6,
    softmax_float32=1,
    softmax_bfloat16=1,
)


def test_stock_operations_that_vary_as_measured_on_cuda():
    rows = step_rows(lambda dtype, compiled, deterministic: not deterministic)
    assert conclusion.conclude(CUDA, rows, TEST, elsewhere={"pooling"}) == (
        "Replay is bit-exact on this machine for float32 and bfloat16, eager and compiled, with deterministic "
        "operations (the default); not bit-exact for float32 and bfloat16, eager and compiled, with stock operations: "
        "embedding gradient, attention backward (bfloat16); "
        "not bit-exact for a model that uses pooling (float32)."
    )


def test_nothing_is_exact():
    said = conclusion.conclude(CUDA, step_rows(lambda *setting: True), TEST, elsewhere={"pooling"})
    assert said.startswith("Replay is not bit-exact on this machine for float32 and bfloat16, eager and compiled, with")
    assert ": embedding gradient, attention backward (bfloat16); not" in said


def test_an_operation_that_has_no_replacement_is_named_and_replaced_ones_are_not():
    rows = [row for row in CUDA if row.name != "softmax"]
    rows += operation_rows(softmax_float32=1, softmax_bfloat16=2)
    varies = step_rows(lambda dtype, compiled, deterministic: deterministic and dtype == "bfloat16")
    said = conclusion.conclude(rows, varies, TEST, elsewhere={"pooling"})
    assert said.startswith("Replay is bit-exact on this machine for float32, eager and compiled, with deterministic op")
    assert "not bit-exact for bfloat16, eager and compiled, with deterministic operations" in said
    assert ": softmax (bfloat16); not bit-exact for a model that uses pooling (float32)." in said


def test_settings_that_are_no_product_are_listed():
    said = conclusion.conclude(
        [], step_rows(lambda dtype, compiled, det: det and dtype == "float32" and compiled), TEST
    )
    assert (
        "for float32 eager, bfloat16 eager and bfloat16 compiled, with deterministic operations (the default)" in said
    )


REFERENCE = {"backend": "cpu", "system": "Linux", "blas": {"library": "libblas.so.3"}, "jit_compiler": "g++ 12"}


def test_a_reference_blas_is_named_with_what_to_do():
    said = " ".join(advice(REFERENCE, 6.2))
    assert "reference BLAS (libblas.so.3, 6 GFLOP/s)" in said and "LD_PRELOAD=" in said and "other bits" in said


def test_a_tuned_blas_or_none_at_all_is_no_news():
    tuned = REFERENCE | {"blas": {"library": "libblas.so.3", "internal_api": "openblas"}}
    assert len(advice(tuned, 9.0)) == 1  # a busy machine is no reference BLAS
    assert advice({"backend": "cuda", "system": "Linux", "blas": None, "jit_compiler": None}, 9.0) == []


def test_a_missing_compiler_is_named():
    assert "no g++" in advice(REFERENCE | {"jit_compiler": "none (MLX runs uncompiled)"}, 100.0)[-1]
