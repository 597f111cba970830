"""Speeds against published ones, and what a plan says about where its figures come from."""

from __future__ import annotations

import csv
from dataclasses import replace
from importlib import resources

import pytest

from benchmarks.calibration import main, predicted
from benchmarks.schedule import bench_of
from digenrl.simulate.candidate import Costing
from digenrl.simulate.costs import CONNECTION_GB_S, Costs
from digenrl.simulate.hardware import Hardware, Pool, assign, parse_hardware
from digenrl.simulate.workload import Workload

WORK = Workload("flux1_dev", 512, 512, 1, 6, 5, 8, 8, 2, False, 64)
POOL = Pool("p", "H100-SXM", 8, "auto", 80, 989, 3.35, 450, 25, 8)


def test_published_speeds_are_met() -> None:
    text = resources.files("digenrl.simulate").joinpath("published.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    ratios = [predicted(row) / float(row["measured_s"]) for row in rows]
    assert len(ratios) >= 30
    assert sum(0.75 <= ratio <= 1.25 for ratio in ratios) >= 0.85 * len(ratios)
    assert sum(0.65 <= ratio <= 1.35 for ratio in ratios) >= len(ratios) - 2


def test_a_row_that_is_not_known_is_named_and_not_counted(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"{tmp_path}/rows.csv"
    head = "family,parameters_b,px,frames,steps,cfg_passes,batch,gpu,engine,measured_s,unit,source"
    rows = [f"flux,12,1024x1024,1,28,1,1,{gpu},eager,24.0,s/sample,here" for gpu in ("L20", "TPU")]
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join([head, *rows]))
    assert main([f"rows={path}"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "TPU" in out[2]
    assert out[-1] == "within 25%: 1 of 1"


@pytest.mark.parametrize("experiment", ["wan21_flowgrpo", "flux1_flowgrpo", "hunyuanvideo_dancegrpo"])
def test_an_h100_is_three_to_four_times_a_4090(experiment: str) -> None:
    table = bench_of(experiment, "unequal")[0].seconds_per_unit()
    for stage in ("generate", "train"):
        assert 3.1 <= (table[stage]["slow"] or 0.0) / (table[stage]["fast"] or 1.0) <= 3.9


def test_a_figure_says_where_it_comes_from() -> None:
    costs = Costs(WORK, Hardware((POOL,), {"train": {"p": 1.0}}))
    assert [costs.source(stage, POOL) for stage in ("train", "generate", "decode")] == [
        "measured",
        "published",
        "assumed",
    ]
    node = {"pools": {"p": {"gpu": "H100", "memory_gib": 80, "tflops": 989, "hbm_tb_s": 3, "intra_gb_s": 9,
                            "inter_gb_s": 9, "efficiency": {"generate": 0.3}}}}  # fmt: skip
    own = parse_hardware(node)
    assert Costs(WORK, own).source("generate", own.pools[0]) == "assumed"
    assert own.pools[0].reaches.generate == 0.3
    assert own.pools[0].reaches.attention == POOL.reaches.attention


def test_publication_is_charged_as_it_is_sent() -> None:
    """A copy in 16 bit for each other node with rollouts; inside a node the network has nothing to do."""
    hardware = Hardware((replace(POOL, count=24),))
    costing, gigabytes = Costing(WORK, hardware), 2 * WORK.trained_parameters / 1e9
    for rollouts, others in ((4, 0), (8, 1), (20, 2)):
        assert costing.other_nodes(assign(hardware, 4, rollouts)) == others
    costs, link = Costs(WORK, hardware), POOL.inter_gb_s * POOL.reaches.network
    assert costs.publish_seconds([POOL], 0) == pytest.approx(gigabytes / CONNECTION_GB_S + 5e-3)
    assert costs.publish_seconds([POOL], 100) == pytest.approx(100 * gigabytes / link + 5e-3)
