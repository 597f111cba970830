"""Every decision of a real run is recorded, and the record gives every one again (I13); TAG in real
runs."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from digenrl import run
from digenrl.cluster.world import World
from digenrl.schedule.scheduler import LEND, TRAIN
from tests.schedule.replaying import replay
from tests.strategy.conftest import EVERYTHING
from tests.strategy.processes import (
    Cluster,
    Job,
    assert_same_cells,
    completed,
    configured,
    run_cluster,
    run_series,
    slow_rollouts,
)
from tests.strategy.test_equality import LIGHT, reference_of
from tests.strategy.test_losses import inject

pytestmark = pytest.mark.processes


def records(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """File name -> rows. The last line of a killed rank may be torn."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((run_dir / "decisions").glob("rank-*.jsonl")):
        lines = path.read_text().splitlines()
        whole = lines if not lines or lines[-1].endswith("}") else lines[:-1]
        found[path.name] = [json.loads(line) for line in whole]
    return found


def assert_replays(run_dir: Path, ranks: int) -> Counter[str]:
    """Every rank's record gives its decisions again; how many of each were recorded."""
    everyone = records(run_dir)
    assert len(everyone) == ranks
    counts: Counter[str] = Counter()
    for file, rows in everyone.items():
        assert replay(rows) == [], file
        counts.update(row["decision"] for row in rows if "decision" in row)
    assert counts["next_move"] > 0
    assert counts["takes"] > 0
    return counts


def test_I13_replaying_recorded_runs_gives_every_decision_again(
    everything: dict[str, Cluster],
) -> None:
    for name, cluster in everything.items():
        counts = assert_replays(cluster.run_dir, ranks=3)
        assert counts["lend"] > 0, name
    own = records(everything["full"].run_dir)["rank-000.jsonl"]
    opened = [row["answer"] for row in own if row.get("decision") == "opens"]
    assert opened[0] == 0, "no cost is known before the first step"
    assert max(opened) > 0, "an idle trainer begins a step faster than rollouts"
    row = next(row for row in own if row.get("decision") == "next_move" and row["answer"] == TRAIN)
    row["answer"] = LEND
    assert replay(own) == [(row, TRAIN)], "a record that was tampered with is told"


@pytest.mark.slow
def test_I13_the_record_of_colocated_ranks_gives_every_decision_again(tmp_path: Path) -> None:
    words = ("schedule=colocated", "schedule.gap=1", "schedule.tsp.batch=1", "max_rl_steps=1")
    config = configured(*LIGHT, *words)
    cluster = run_cluster(tmp_path, 2, 0, config, after_build=slow_rollouts)
    assert_same_cells(completed(cluster), reference_of(config))
    assert_replays(tmp_path, ranks=2)


@pytest.mark.slow
def test_I13_the_record_of_a_run_with_a_death_gives_every_decision_again(tmp_path: Path) -> None:
    config = configured(*LIGHT, *EVERYTHING["full"])
    death = inject(("denoise", 2, "kill", 3))
    cluster = run_cluster(tmp_path, 1, 2, config, before=death, after_build=slow_rollouts)
    assert_same_cells(completed(cluster), reference_of(config))
    assert_replays(tmp_path, ranks=3)


def events_of(cluster: Cluster, kind: str) -> list[dict[str, Any]]:
    return [row for row in cluster.events() if row["kind"] == kind]


def unpredicted_sleeps(rank: run.Rank, world: World) -> None:
    """Slow rollouts, and an optimizer step that takes longer than anybody predicts."""
    slow_rollouts(rank, world, seconds=0.02)
    if world.is_trainer:
        step = rank.strategy.optimizer_step

        def slower(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.8)
            return step(*args, **kwargs)

        rank.strategy.optimizer_step = slower  # type: ignore[method-assign]


@pytest.mark.slow
def test_the_real_search_lends_in_a_real_run_and_switches_itself_off_where_it_errs(
    tmp_path: Path,
) -> None:
    """One slow rollout rank, a trainer twelve times as fast: what is lent is trained like
    everything else. Where every optimizer step sleeps, which nobody predicts, the error exceeds the
    gain, and the run says so."""
    words = ("schedule.gap=1", "schedule.tag=true")
    jobs = [
        Job("lends", configured(*LIGHT, *words, "max_rl_steps=3"), slow_rollouts),
        Job("errs", configured(*LIGHT, *words, "max_rl_steps=5"), unpredicted_sleeps),
    ]
    for job, cluster in run_series(tmp_path, 1, 1, jobs):
        assert_same_cells(completed(cluster), reference_of(job.config))
        loans, lent = (
            events_of(cluster, "lend"),
            [row for row in cluster.spans("lend") if row["rank"] == 0],
        )
        assert loans, "the search never lent"
        assert len(lent) >= len(loans)
        rows = records(cluster.run_dir)["rank-000.jsonl"]
        assert any(row.get("decision") == "lend" and row["answer"] > 0 for row in rows)
        assert any(row.get("event") == "measured" and row["args"][0] == "switch" for row in rows)
        if job.name == "lends":
            assert all(loan["predicted_s"] < loan["predicted_without_s"] for loan in loans)
            assert not events_of(cluster, "tag_off")
        else:
            (event,) = events_of(cluster, "tag_off")
            assert "schedule.tag switched itself off after 3 loans" in event["message"]
            # A step's first tasks are lent before the step before it is judged.
            lent_in = {loan["rl_step"] for loan in loans}
            assert {1, 2, 3} <= lent_in <= {1, 2, 3, 4}, "nothing is lent afterwards"
