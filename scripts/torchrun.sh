#!/usr/bin/env bash
# Start a run on several machines with torchrun. On every machine, in the same directory of a shared file system:
#   NODES=2 RANKS=8 HEAD=host-of-the-first-machine scripts/torchrun.sh experiment=wan21_flowgrpo hardware=testbed_c \
#       allocation.trainers=8 allocation.rollouts=8
# The hardware profile says which processes train, when machines are started in the order of its pools (the first joins
# first). Any rank's death ends the job on all machines; continue with resume=RUN.
# Two runs with the same words at a time: give each a RUN_ID of its own (the same on all of its machines), or a PORT.
# ADDRESS: this machine's address (and HEAD the first one's), where names do not resolve to them.
# A signal to torchrun (SIGTERM, Ctrl-C) ends the run after the RL step in progress, which is saved: GRACE seconds for it.
# network.interface=ib0 network.ports=[29600,29650]: where the ranks listen and connect (the agents use HEAD and PORT).
set -euo pipefail
own=()
if [[ -n "${ADDRESS:-}" ]]; then
    own=(--local-addr "$ADDRESS" --rdzv-conf "is_host=$([[ "$ADDRESS" == "${HEAD:-}" ]] && echo 1 || echo 0)")
fi
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${GRACE:-300}"
python=python
[[ ! -x .venv/bin/python ]] || python=.venv/bin/python
if [[ "${NODES:-1}" == 1 ]]; then  # one agent: any free port, and an id that nobody else has
    id="${RUN_ID:-$$-$RANDOM}" port="${PORT:-0}"
else  # every machine must compute the same
    id="${RUN_ID:-$(cksum <<<"$PWD $*" | cut -d' ' -f1)}"
    port="${PORT:-$((20000 + $(cksum <<<"$id" | cut -d' ' -f1) % 10000))}"
fi
exec "$python" -m torch.distributed.run --nnodes "${NODES:-1}" --nproc-per-node "${RANKS:?ranks per machine}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost}:$port" --rdzv-id "$id" \
    "${own[@]}" -m digenrl.cli.train "$@"
