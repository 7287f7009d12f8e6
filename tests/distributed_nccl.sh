#!/bin/sh
# Records, replays, kills and resumes a data-parallel run of 2 ranks (RANKS) over NCCL (BACKEND), one GPU a rank.
# Prints what was measured, and exits with 0 only if every replay was exact and the resumed run has the bits of an
# undisturbed one. Usage, on a machine with 2 GPUs and mlx's CUDA wheel: sh tests/distributed_nccl.sh [FOLDER]
# BACKEND=ring RUNS_ON=cpu does the same on CPUs.
set -u
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
python=${PYTHON:-python3}
exec "$python" "$here/data_parallel.py" "$folder" --backend "${BACKEND:-nccl}" --ranks "${RANKS:-2}" \
    --device "${RUNS_ON:-gpu}" ${PRESET:+--preset "$PRESET"} ${DTYPE:+--dtype "$DTYPE"} ${MODE:+--mode "$MODE"}
