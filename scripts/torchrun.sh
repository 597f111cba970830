#!/usr/bin/env bash
# Start a run on several machines with torchrun. On every machine:
#   NODES=2 RANKS=8 HEAD=host-of-the-first-machine scripts/torchrun.sh experiment=wan21_flowgrpo hardware=testbed_c \
#       allocation.trainers=8 allocation.rollouts=8
# Trainers are the first ranks. Any rank's death ends the job on all machines; continue with resume=RUN.
set -euo pipefail
exec torchrun --nnodes "${NODES:-1}" --nproc-per-node "${RANKS:?ranks per machine}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost}:${PORT:-29400}" --rdzv-id "${RUN_ID:-digenrl}" \
    -m digenrl.cli.train "$@"
