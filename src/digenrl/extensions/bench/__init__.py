"""Standard benchmarks, and scores of pictures in a folder."""

from digenrl.config.commands import Command

COMMANDS = {
    "benchmark": Command(
        "digenrl.extensions.bench.cli.benchmark",
        "GenEval, DPG, PartiPrompts, VBench or drawn scenes of a checkpoint: benchmark RUN",
        "run",
        run_required=False,
    ),
    "score": Command(
        "digenrl.extensions.bench.cli.score", "score a folder of pictures or videos with any reward"
    ),
}
