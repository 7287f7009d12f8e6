"""One backend for all tests but those marked `cuda`: bits are compared, and only the CPU's are promised everywhere."""

import pytest
from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)  # a busy machine is no failure
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def device(request):
    import mlx.core as mx

    before = mx.default_device()
    mx.set_default_device(mx.gpu if request.node.get_closest_marker("cuda") else mx.cpu)
    yield
    mx.set_default_device(before)
    try:
        mx.eval(mx.random.state)
    except RuntimeError:  # a compiled function drew from it without having it among its inputs and outputs
        mx.random.seed(0)
