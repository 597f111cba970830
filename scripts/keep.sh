#!/usr/bin/env bash
# Train, and begin again where the command itself is killed (kill -9, for lack of memory), with everything that it started:
#   RUN=outputs/mine scripts/keep.sh digenrl train experiment=wan21_flowgrpo hardware=testbed_c
# RUN: the run's directory. With a checkpoint there, the same line goes on from the newest, also after a lost machine.
# RESTARTS=3: so often in a row without a further checkpoint. Dead ranks are the command's own business
# (allocation.max_restarts). Whatever else ends it, a signal to this script (passed on) included, ends this too.
set -uo pipefail -m  # -m: who is in the background gets SIGINT as well
run=${RUN:?the directory of the run} command=() words=() left=${RESTARTS:-3} before=
repeated='^[+]*(allow_targets|confirm_hosts|data[.]prompt_store|.*[.](serve|serve[.]args|attention_backend))='  # count on a command line alone
for word; do
    if [[ $word == *=* || $word == "~"* ]]; then words+=("$word"); else command+=("$word"); fi
done
for signal in INT TERM HUP QUIT USR1; do
    trap "kill -s $signal \$child" $signal  # \$: when it comes
done

while true; do
    now=("hydra.run.dir=$run" "${words[@]}")
    if [[ -e $run/checkpoints/last ]]; then  # the run's config.yaml has all other words
        now=("resume=$run")
        for word in "${words[@]}"; do [[ ! $word =~ $repeated ]] || now+=("$word"); done
    fi
    "${command[@]}" "${now[@]}" &
    child=$!
    wait $child
    code=$?
    while kill -0 $child 2> /dev/null; do  # a signal came, which it obeys
        wait $child
        code=$?
    done
    newest=$(readlink -f "$run/checkpoints/last")
    [[ $newest == "$before" ]] || left=${RESTARTS:-3}
    before=$newest
    if ((code != 137 || left-- < 1)) || [[ ! -e $newest ]]; then exit $code; fi
    echo "the command was killed: it begins again from $newest" >&2
    for ((wait = 0; wait < 600; wait++)); do kill -0 -- -$child 2> /dev/null && sleep 0.1; done  # the report is still written
done
