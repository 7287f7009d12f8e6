"""What a launcher leaves in the environment of each process that it starts. Needs no MLX."""

from __future__ import annotations

import os
from collections.abc import Mapping

# What MLX's launcher (or mpirun) sets for each process, by back end: `mlx._distributed_utils.launch`, mlx 0.32.4.
_SIGNS = {
    "ring": ("MLX_HOSTFILE", "MLX_RANK"),
    "nccl": ("NCCL_HOST_IP", "MLX_WORLD_SIZE", "MLX_RANK"),
    "jaccl": ("MLX_IBV_DEVICES", "MLX_RANK"),
    "mpi": ("OMPI_COMM_WORLD_RANK",),
}
BACKENDS = tuple(_SIGNS)


def backend_here(environment: Mapping[str, str] | None = None) -> str | None:
    """The back end that a launcher has set this process up for; None: no launcher started it."""
    given = os.environ if environment is None else environment
    return next((name for name, signs in _SIGNS.items() if all(given.get(sign) for sign in signs)), None)
