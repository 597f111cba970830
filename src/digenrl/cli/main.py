"""`digenrl COMMAND [key=value ...]`: every command by one name, from any directory.

Modules of the working directory can be named in `_target_` (with allow_targets), after those that are installed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": ("train", "train: experiment=NAME hardware=NAME key=value; -m sweeps"),
    "resume": ("train", "continue a run from its last checkpoint: resume RUN"),
    "join": ("join", "add one rollout to a running run, from any machine: join RUN"),
    "replay": ("train", "train again from a run's trajectories, with nothing generated: replay RUN"),
    "plan": ("plan", "what a run will cost on a hardware profile; needs no GPU"),
    "profile": ("profile", "measure this machine's seconds per unit, for a hardware profile"),
    "prompts": ("prompts", "use a published prompt set: its download, its check, its settings"),
    "encode": ("encode", "encode the prompts of a run into the prompt store"),
    "report": ("report", "rebuild summary, pictures and report of a run: report RUN"),
    "watch": ("watch", "a live page of a run, in a browser of this machine: watch RUN"),
    "eval": ("evaluate", "evaluate a run's model again, with other prompts, steps or rewards: eval RUN"),
    "benchmark": ("benchmark", "GenEval, DPG, PartiPrompts, VBench or drawn scenes of a checkpoint: benchmark RUN"),
    "export": ("export", "write a run's trained weights as diffusers reads them: export RUN"),
    "score": ("score", "score a folder of pictures or videos with any reward"),
    "serve-reward": ("serve_reward", "serve a reward over HTTP"),
    "new": ("new", "write a working skeleton with its test: new reward|model|hardware|experiment NAME"),
    "tiny": ("tiny", "build the tiny model of every family (made on first use otherwise)"),
    "check": ("setup", "check this machine: versions, devices, memory, disk"),
}
"""Command -> (module of this package, what it does)."""
OF_A_RUN = {
    "resume": "resume",
    "join": "run",
    "replay": "replay",
    "report": "run",
    "watch": "run",
    "eval": "run",
    "benchmark": "run",
    "export": "run",
}
"""Command -> the key whose value its first word is."""


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: that of the command; 2 where there is no such command.

    Args:
        words: the command line; None: this process's own.
    """
    name, *rest = [*(sys.argv[1:] if words is None else words)] or ["--help"]
    if name in ("-h", "--help"):
        from digenrl.config.help import show

        show("\n".join([(__doc__ or "").strip(), "", *_lines(), "", "digenrl COMMAND --help lists its keys."]))
        return 0
    if name not in COMMANDS:
        from digenrl.config.errors import nearest

        close = nearest(name, list(COMMANDS))
        hint = f"nearest: {close}." if close else f"there are {', '.join(COMMANDS)}."
        print(f"digenrl {name}: no such command; {hint}", file=sys.stderr)
        return 2
    key = OF_A_RUN.get(name)
    if key and rest and "=" not in rest[0] and not rest[0].startswith("-"):
        rest[0] = f"{key}={rest[0]}"
    needed = key is not None and name != "benchmark"  # which may also look at a model that no run trained
    if needed and not any(word.startswith((f"{key}=", "-h", "--help")) for word in rest):
        print(f"digenrl {name}: say which run, e.g. digenrl {name} outputs/EXPERIMENT/TIME-0", file=sys.stderr)
        return 2
    sys.path.append(os.getcwd())  # last, so that no file there stands in for an installed module
    return int(importlib.import_module(f"digenrl.cli.{COMMANDS[name][0]}").main(rest))


def _lines() -> list[str]:
    return [f"  {name:<14}{text}" for name, (_, text) in COMMANDS.items()]


if __name__ == "__main__":
    sys.exit(main())
