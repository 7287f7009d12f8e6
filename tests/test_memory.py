"""Bytes of a state, counted by hand; and that there is some memory."""

import mlx.optimizers as optim
from helpers import experiment, mlp

from workbench import memory as module
from workbench.experiment import ensure_initialised
from workbench.memory import container_limits, memory, state_size

NUMBERS = 4 * 8 + 8 + 8 + 1  # of the small model


def size(**options):
    job = experiment(**options)
    ensure_initialised(job.optimizer, job.model)
    return state_size(job)


def test_weights_two_moments_and_two_scalars():
    assert size() == 4 * 3 * NUMBERS + 8 + 4
    assert size(dtype="bfloat16") == 2 * 3 * NUMBERS + 8 + 4
    assert size(optimizer=optim.Lion(1e-3)) == 4 * 2 * NUMBERS + 8 + 4


def test_what_is_frozen_takes_nothing_more():
    model = mlp()
    model.layers[0].freeze()
    assert size(model=model) == 4 * 3 * (8 + 1) + 8 + 4


def test_there_is_more_memory_than_one_gigabyte():
    assert memory() > 2**30


def tree(root, lines, limits):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for path, text in limits.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_a_container_of_version_2_limits_it_at_any_level(tmp_path):
    limits = {"a/b/memory.max": "max\n", "a/memory.max": "8589934592\n"}
    assert container_limits(tree(tmp_path, "0::/a/b\n", limits)) == [2**33]


def test_inside_a_container_only_the_root_is_there(tmp_path):
    assert container_limits(tree(tmp_path, "0::/docker/123\n", {"memory.max": "8589934592\n"})) == [2**33]


def test_a_container_of_version_1_limits_it(tmp_path):
    lines = "9:name=systemd:/\n4:cpu,memory:/x\n3:cpuset:/y\n0::/\n"
    limits = {"memory/x/memory.limit_in_bytes": "1073741824", "memory/memory.limit_in_bytes": "9223372036854771712"}
    assert sorted(container_limits(tree(tmp_path, lines, limits))) == [2**30, 9223372036854771712]


def test_where_there_are_no_control_groups_nothing_limits_it(tmp_path):
    assert container_limits(tmp_path) == [] and container_limits(tree(tmp_path, "nonsense\n", {})) == []


def test_the_smaller_of_host_and_container_counts(monkeypatch):
    whole = memory()
    monkeypatch.setattr(module, "container_limits", lambda: [2**62, whole // 2])
    assert memory() == whole // 2
