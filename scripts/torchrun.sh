#!/usr/bin/env bash
# Start a run on several machines with torchrun. On every machine, in the same directory of a shared file system:
#   NODES=2 RANKS=8 HEAD=host-of-the-first-machine scripts/torchrun.sh experiment=wan21_flowgrpo hardware=testbed_c \
#       allocation.trainers=8 allocation.rollouts=8
# The hardware profile says which processes train, when machines are started in the order of its pools (the first joins
# first). Any rank's death ends the job on all machines; continue with resume=RUN.
# ADDRESS: this machine's address (and HEAD the first one's), where names do not resolve to them.
# A signal to torchrun (SIGTERM, Ctrl-C) ends the run after the RL step in progress, which is saved: GRACE seconds for it.
# network.interface=ib0 network.ports=[29600,29650]: where the ranks listen and connect (the agents use HEAD and PORT).
set -euo pipefail
own=()
if [[ -n "${ADDRESS:-}" ]]; then
    own=(--local-addr "$ADDRESS" --rdzv-conf "is_host=$([[ "$ADDRESS" == "${HEAD:-}" ]] && echo 1 || echo 0)")
fi
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${GRACE:-300}"
exec torchrun --nnodes "${NODES:-1}" --nproc-per-node "${RANKS:?ranks per machine}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost}:${PORT:-29400}" --rdzv-id "${RUN_ID:-digenrl}" \
    "${own[@]}" -m digenrl.cli.train "$@"
