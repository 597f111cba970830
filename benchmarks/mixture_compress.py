"""What it costs on the tilted mixture that only the largest values of a gradient travel between two
trainers (`parallel.compress`): score against bytes.

    python -m benchmarks.mixture_compress [shares=off,0.1,0.01,0.001] [seeds=5] [steps=100]

A run is Flow-GRPO's of `benchmarks.mixture_study` (KL weight 1), divided over two processes. Both
draw all samples, each trains every second one, and they exchange gradients over gloo with the code
of a real run. Score, KL and noise are that study's. Its record, mixture_runs.jsonl, keeps the runs. The
table has the bytes that a trainer sends in an update, and the score lost against the run of the
same seed with whole gradients.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._shared import RESULTS, Report, options
from benchmarks.mixture_study import (
    ALGORITHMS,
    Batch,
    Loop,
    Setting,
    add_to_record,
    identity,
    judge,
    recorded,
)
from benchmarks.mixture_tables import of, shown
from digenrl.extensions.planner.links import gradient_bytes
from digenrl.strategy.exchange import GradientExchange
from digenrl.types import CellBlock, TrainBatch

TRAINERS = 2


class Trainer(Loop):
    """One of two trainers of a run."""

    def __init__(self, setting: Setting, seed: int, rank: int) -> None:
        share = None if setting.value == 1.0 else setting.value
        super().__init__(replace(setting, knob="algorithm.kl_weight", value=1.0), seed)
        self.rank, self.exchange = rank, GradientExchange(share, TRAINERS)
        self.trained = self.policy.adapter.trained_parameters()

    def learn(self, batch: Batch, step: int) -> None:
        """The updates of one RL step, with a gradient that is a mean over the trainers."""
        for update, blocks in enumerate(batch.updates):
            self.optimizer.zero_grad()
            cells = sum(block.samples * len(block.steps) for block in blocks) / TRAINERS
            own = tuple(every_second(block, self.rank) for block in blocks)
            given = TrainBatch(own, {"r": batch.rewards}, {"r": 1.0}, float(cells), update, step)
            self.module.training_step(given, 0).backward()
            self.exchange.average(self.trained, 1.0)
            self.module.configure_gradient_clipping(self.optimizer)
            self.optimizer.step()


def every_second(block: CellBlock, rank: int) -> CellBlock:
    """The samples of a block that a trainer trains."""
    own, steps = slice(rank, None, TRAINERS), len(block.steps)

    def part(rows: Tensor | None) -> Any:
        return None if rows is None else rows[own]

    condition = {
        name: value.unflatten(0, (-1, steps))[own].flatten(0, 1)
        for name, value in block.condition.items()
    }
    return replace(
        block, latents=part(block.latents), next_latents=part(block.next_latents),
        log_probs=part(block.log_probs), means=part(block.means), final=part(block.final),
        rows=block.numbers[own], condition=condition,
    )  # fmt: skip


def train(setting: Setting, seed: int, steps: int, folder: Path, rank: int) -> None:
    """Be one trainer; trainer 0 writes what the run has reached."""
    store = dist.FileStore(str(folder / "store"), TRAINERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=TRAINERS)
    torch.set_num_threads(1)
    began = time.process_time()
    loop = Trainer(setting, seed, rank)
    loop.run(steps)
    weights = torch.cat([each.detach().flatten() for each in loop.trained.values()])
    everyone = [torch.empty_like(weights) for _ in range(TRAINERS)]
    dist.all_gather(everyone, weights)
    assert torch.equal(*everyone), "the trainers' weights differ"
    clipped = loop.module.collect_metrics()["clip_fraction"]
    if rank == 0:
        reached = asdict(judge(setting.base).measured(loop.policy))
        whole = gradient_bytes(len(weights), TRAINERS)
        facts = {
            "bytes": loop.exchange.facts.get("gradient_bytes", whole),
            "clip_fraction": float(clipped),
            "cpu_s": round(TRAINERS * (time.process_time() - began), 3),
        }
        (folder / "row.json").write_text(json.dumps(reached | facts))
    dist.destroy_process_group()


def row_of(setting: Setting, seed: int, steps: int) -> dict[str, Any]:
    """Facts of one run, made now in two forked processes.

    Raises:
        RuntimeError: one of them failed.
    """
    with tempfile.TemporaryDirectory() as name:
        fork, folder = multiprocessing.get_context("fork"), Path(name)
        ranks = [
            fork.Process(target=train, args=(setting, seed, steps, folder, rank))
            for rank in range(TRAINERS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(
                f"share {setting.value:g}, seed {seed}: a trainer failed, see above."
            )
        found: dict[str, Any] = json.loads((folder / "row.json").read_text())
    return found


def rows_of(shares: Sequence[float], seeds: int, steps: int, keep: bool) -> list[dict[str, Any]]:
    """Facts of every run, from the record or made now; `keep` adds these to the record."""
    known, rows = recorded(), []
    for seed in range(1, seeds + 1):
        for share in shares:
            words = ALGORITHMS["flowgrpo"][0]
            setting = Setting("compress", "flowgrpo", words, "parallel.compress", share)
            own = identity(setting, seed, steps)
            row = next((old for old in known if own.items() <= old.items()), None)
            if row is None:
                row = own | row_of(setting, seed, steps)
                if keep:
                    add_to_record(row)
            print(
                f"share {share:<6g} seed {seed}  {row['bytes']:.0f} bytes  KL {row['kl']:.3f}  "
                f"score {row['score']:.3f}  {row['cpu_s']:.1f} s",
                flush=True,
            )
            rows.append(row)
    return rows


def write_table(rows: Sequence[dict[str, Any]], wanted: int) -> None:
    """Write mixture_compress.md: a row per share."""
    columns = ("compress", "bytes sent an update", "score", "spread", "lost", "KL")
    notes = (
        f"{len(rows)} of {wanted} runs of {rows[0]['steps']} RL steps, two trainers. Intervals are of "
        "95 %, by Student's t over seeds; *lost* is paired by seed."
    )
    report = Report("Compressed gradients on the tilted mixture", notes, columns)
    whole = {row["seed"]: row for row in of(rows, value=1.0)}
    for share in sorted({row["value"] for row in rows}, reverse=True):
        runs = of(rows, value=share)
        scores = [row["score"] for row in runs]
        lost = [whole[row["seed"]]["score"] - row["score"] for row in runs if row["seed"] in whole]
        report.row(
            "off" if share == 1.0 else f"{share:g}",
            f"{runs[0]['bytes']:.0f}",
            shown(scores),
            f"{min(scores):.3f} .. {max(scores):.3f}",
            "-" if share == 1.0 or not lost else shown(lost),
            f"{statistics.fmean(row['kl'] for row in runs):.3f}",
        )
    report.write(RESULTS / "mixture_compress.md")


def main(words: Sequence[str]) -> int:
    """Run what is missing; the exit code."""
    usual = {"shares": "off,0.1,0.01,0.001", "seeds": "5", "steps": "100"}
    given = options(words, usual, {"seeds": "1", "steps": "2"})
    torch.set_num_threads(1)
    judge("overlapping")  # once, before the runs fork
    shares = [1.0 if word == "off" else float(word) for word in given["shares"].split(",")]
    seeds, keep = int(given["seeds"]), given["quick"] != "true"
    rows = rows_of(shares, seeds, int(given["steps"]), keep)
    if keep:
        write_table(rows, len(shares) * seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
