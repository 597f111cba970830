"""A long run of a toy task, watched: what its processes hold, and what its directory takes, must
not grow with steps.

    make soak ARGS="steps=10000"        (python -m tests.soak steps=10000 minutes=600)

After `minutes` the run is stopped, and judged by the steps that it has made. The last line of
standard output is the path of a JSON file. It has `grown` (figures above their bounds), all
`figures` beside their bounds, and `samples` of memory, open files and bytes over the RL steps.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import digenrl.extensions.tasks.digits  # noqa: F401  (diffusers loads once, here, and not in every process)
from digenrl import run  # noqa: F401
from tests.training import Train, commands

WORDS = (
    "data.prompts_per_batch=2",
    "data.group_size=2",
    "sampling.steps=2",
    "sampling.eval.steps=2",
    "schedule=full",
)
RUN = ("allocation.trainers=1", "allocation.rollouts=2", "record.keep_mib=2")
EVERY_S = 0.5
WARM = 0.25
"""Share of the steps in which allocators, caches and files fill up to their bounds."""
MEMORY_MIB, FILES, DIRECTORY_MIB, ROW_BYTES, REPORT_MIB, REPORT_S = 12.0, 4, 4.0, 4096, 4.0, 60.0
"""Most growth after `WARM`: memory of a process, its open files, and the run's directory without
metrics.jsonl. Then bytes of metrics.jsonl a step, size of the report, and seconds that the report
takes."""
OUTPUT = Path("outputs/soak")


def look(train: Train) -> dict[str, Any] | None:
    """What the run holds now; None while it begins or ends."""
    with suppress(
        psutil.Error, OSError, IndexError, StopIteration, ValueError
    ):  # not all of it is there
        metrics = train.run_dir / "metrics.jsonl"
        last = json.loads(_last_line(metrics))
        names = ("launcher", "trainer", "rollout 1", "rollout 2")
        processes = dict(zip(names, [psutil.Process(train.pid), *train.ranks()], strict=True))
        sizes = [
            path.stat().st_size
            for path in train.run_dir.rglob("*")
            if path.is_file() and path != metrics
        ]
        return {
            "rl_step": last["rl_step"],
            "memory_mib": {
                name: process.memory_info().rss / 2**20 for name, process in processes.items()
            },
            "files": {name: process.num_fds() for name, process in processes.items()},
            "directory_mib": sum(sizes) / 2**20,
        }
    return None


def _last_line(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        return file.read().rpartition(b"\n")[0].splitlines()[-1]


def soak(root: Path, steps: int, minutes: float = math.inf) -> dict[str, Any]:
    """Run so many RL steps (or as many as there is time for), and say what grew."""
    started = commands(root)
    train = next(started)(
        *WORDS,
        *RUN,
        f"callbacks.checkpoint.every={max(10, steps // 40)}",
        f"max_rl_steps={steps}",
        fork=True,
    )
    samples: list[dict[str, Any]] = []
    deadline = time.monotonic() + 60.0 * minutes
    try:
        while train.poll() is None:
            time.sleep(EVERY_S)
            if time.monotonic() > deadline:
                deadline = math.inf
                os.kill(train.pid, signal.SIGTERM)
            if (sample := look(train)) is not None:
                samples.append(sample)
        assert train.poll() in (0, 128 + signal.SIGTERM), train.stderr
        steps = train.summary["rl_steps"]
        ends = {row["kind"]: row["time"] for row in train.rows("events.jsonl")}
        size = (train.run_dir / "metrics.jsonl").stat().st_size
        found = {
            "steps": steps,
            "report_mib": (train.run_dir / "report.html").stat().st_size / 2**20,
            "report_s": (train.run_dir / "report.html").stat().st_mtime - ends["stop"],
            "row_bytes": size / steps,
        }
    finally:
        next(started, None)
    seen = figures(samples, steps, found)
    grown = [
        f"{name}: {value:.1f}, at most {most:g}"
        for name, (value, most) in seen.items()
        if value > most
    ]
    return {
        "grown": grown,
        "figures": seen,
        **found,
        "samples": samples[:: max(1, len(samples) // 200)],
    }


def figures(
    samples: Sequence[dict[str, Any]], steps: int, found: dict[str, Any]
) -> dict[str, tuple[float, float]]:
    """Return name -> (figure, its bound). Growth is counted from the median of the first steps
    after `WARM` to the median of the last steps."""
    early = [sample for sample in samples if WARM <= sample["rl_step"] / steps <= WARM + 0.15]
    late = [sample for sample in samples if sample["rl_step"] / steps >= 0.85]

    def more(*keys: str) -> float:
        def value(sample: Any) -> float:
            for key in keys:
                sample = sample[key]
            return float(sample)

        return statistics.median(map(value, late)) - statistics.median(map(value, early))

    seen = {"growth of the directory, MiB": (more("directory_mib"), DIRECTORY_MIB)}
    for name in late[0]["memory_mib"]:
        seen[f"growth of the {name}'s memory, MiB"] = (more("memory_mib", name), MEMORY_MIB)
        seen[f"growth of the {name}'s open files"] = (more("files", name), FILES)
    seen |= {"bytes of a row of metrics.jsonl": (found["row_bytes"], ROW_BYTES)}
    return seen | {
        "report.html, MiB": (found["report_mib"], REPORT_MIB),
        "report, s": (found["report_s"], REPORT_S),
    }


def main(words: Sequence[str]) -> int:
    """Exit code: 0 when nothing grew."""
    settings = {"steps": 10_000, "minutes": 600} | {
        key: int(value) for key, value in (word.split("=") for word in words)
    }
    with tempfile.TemporaryDirectory() as directory:
        found = soak(Path(directory), settings["steps"], settings["minutes"])
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"steps-{settings['steps']}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(
        *(found["grown"] or [f"{found['steps']} RL steps, nothing grew"]), sep="\n", file=sys.stderr
    )
    print(os.fspath(path.absolute()))
    return int(bool(found["grown"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
