"""The benchmark for a machine with a GPU, tested without a GPU. It runs whole at tiny size on the
processor. Every family's forward path also runs at real size on a CUDA device that does not exist:
fake tensors show mixed devices, dtypes and shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import _device, _families, real_run, real_size
from benchmarks._policy_bench import ENGINES, PROMPT, Build, Unit, attempt, build, composed
from benchmarks._random_builds import FAMILY, REAL, TINY, random_weights
from digenrl import config as configuration
from digenrl.diffusion import denoise
from digenrl.extensions.planner.costs import Costs
from digenrl.extensions.planner.measured import same_gpu, with_measured
from digenrl.extensions.planner.reading import costing_of
from digenrl.hardware import parse_hardware
from digenrl.models.guidance import NEGATIVE
from digenrl.recompute import Recompute
from tests.models.families import FAMILIES as ROWS
from tests.models.real_policies import plainly

pytestmark = pytest.mark.heavy

MODEL = next(iter(real_size.PUBLISHED))


def measured(out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and rows of a benchmark at tiny size."""
    code = real_size.main(["size=tiny", "samples=1", f"out={out}", *words])
    path = out / "real_size-cpu-tiny.json"
    return code, json.loads(path.read_text())["rows"] if path.exists() else {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_family_is_measured_in_slices_and_written_for_people_and_for_the_planner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (f"models={MODEL}", "images=4", "engines=eager")
    assert measured(tmp_path, *words, "budget_s=0") == (0, {})
    assert "measurements are left: the same command goes on" in capsys.readouterr().out
    code, rows = measured(tmp_path, *words)
    assert code == 0
    planned = [unit for _, units in real_size.plan(MODEL, _given("eager")) for unit in units]
    assert set(rows) == {unit.key for unit in planned}
    assert not [row for row in rows.values() if "failed" in row]
    ratios = [row["deviation"] for key, row in rows.items() if "/ratio/" in key]
    assert len(ratios) == 2 * len(real_size.STEPS)
    assert max(ratios) < 1e-5
    (step,) = [row for key, row in rows.items() if "/step/" in key]
    assert step["images"] == 4
    assert sum(step["parts"].values()) == pytest.approx(step["seconds"])
    (table,) = tmp_path.glob("real_size-cpu-tiny-*.md")
    assert "nothing about speed" in table.read_text()
    profile = yaml.safe_load((tmp_path / "cpu-tiny.yaml").read_text())
    stages = profile["models"][MODEL]
    assert set(stages) == {"generate", "train", "encode", "decode"}
    assert all(entry["seconds"] > 0 for entries in stages.values() for entry in entries)
    with mock.patch.object(real_size, "build", side_effect=AssertionError("measured twice")):
        assert measured(tmp_path, *words) == (0, rows)


def test_a_version_is_published_to_nobody() -> None:
    how, device = Build(), torch.device("cpu")
    unit = Unit("sd35_medium", how, "publish")
    row = attempt(build(unit.model, TINY, device, how), unit)
    assert row.get("failed") is None
    assert min(row["bytes"], row["seconds"], row["adopt_seconds"]) > 0


@pytest.mark.slow
def test_a_run_is_set_beside_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert real_run.main(["quick=true", "size=tiny", f"folder={tmp_path}"]) == 0
    assert "met: sd35_medium: first |ratio - 1| is 0." in capsys.readouterr().out


def test_a_run_on_a_gpu_takes_the_profile_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, word in (
        ("h100_80gb_hbm3", "hardware=node_8xh100"),
        ("h200", "hardware=single_gpu"),
        ("unknown", "hardware=single_gpu"),
    ):
        monkeypatch.setattr(_device, "short_name", lambda device, name=name: name)
        monkeypatch.setattr(_device, "capacity_gib", lambda device: 79.2)
        found = real_run.hardware(torch.device("cpu"))
        assert found[0] == word
        hardware = configuration.load(
            ["experiment=sd35_flowgrpo", *found, "allocation.trainers=1", "allocation.rollouts=0"]
        ).settings.hardware
        (pool,) = parse_hardware(hardware).pools
        assert pool.count == pool.per_node == 1
        assert (pool.memory_gib == 79) is (name != "h200")


def _given(engines: str) -> dict[str, str]:
    return real_size.DEFAULTS | {"samples": "1", "images": "4", "engines": engines}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", FAMILY)
def test_every_family_is_measured(model: str, tmp_path: Path) -> None:
    """FLUX, whose blocks are traced, is measured on every engine. The others are not compiled."""
    engines = ",".join(ENGINES) if model == "flux1_dev" else "eager"
    code, rows = measured(tmp_path, f"models={model}", "images=4", f"engines={engines}")
    assert code == 0
    assert set(rows) == {
        unit.key for _, units in real_size.plan(model, _given(engines)) for unit in units
    }
    skipped = {row["skipped"] for row in rows.values() if "skipped" in row}
    assert skipped <= {"the family passes no mask"}
    assert not [row for row in rows.values() if "failed" in row]


def test_results_go_to_out_or_the_repository_and_slices_of_both_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"out": "", "fresh": "false"}
    monkeypatch.delenv("OUT", raising=False)
    assert [path.name for path in real_size.places(given, REAL)] == ["results", "measured"]
    assert real_size.places(given, "tiny")[0] == Path("outputs/real_size")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert real_size.places(given, REAL) == (tmp_path / "out", tmp_path / "out")
    monkeypatch.setattr(real_size, "RESULTS", tmp_path)
    (tmp_path / "out").mkdir()
    for folder, key in ((tmp_path, "committed"), (tmp_path / "out", "here")):
        (folder / "real_size-h200.json").write_text(json.dumps({"rows": {key: {}}}))
    path = tmp_path / "out" / "real_size-h200.json"
    assert set(real_size.kept_rows(path, given)) == {"committed", "here"}
    assert not real_size.kept_rows(path, given | {"fresh": "true"})


def test_what_does_not_fit_is_said_and_more_samples_are_not_tried(tmp_path: Path) -> None:
    results = real_size.Results(tmp_path / "rows.json", {}, {})
    how = Build()
    first, second = (Unit("flux1_dev", how, "train", samples=samples) for samples in (2, 4))
    assert results.missing([first, second]) == [first, second]
    assert results.too_many(second) is None
    results.keep(first, {"full": "CUDA out of memory"})
    assert results.missing([first, second]) == [second]
    assert results.too_many(second) == "fewer samples did not fit"
    results.keep(second, {"failed": "anything else"})
    assert results.missing([second]) == [second], "what failed is tried again"


def test_the_planner_takes_what_was_measured_on_its_gpu(tmp_path: Path) -> None:
    words = ["experiment=flux1_flowgrpo", "hardware=single_gpu"]
    work = costing_of(configuration.load(words)).work
    facts = {
        "gib": None,
        "tokens": work.tokens,
        "passes": 1,
        "reference": False,
        "flops": 1e15,
        "model_gib": 1.0,
    }
    how, full = Build(), Build(full=True)
    rows = {
        Unit("flux1_dev", how, "generate", samples=1): 0.7,
        Unit("flux1_dev", how, "generate", samples=4): 0.4,
        Unit("flux1_dev", how, "generate", "compiled", samples=8): 0.2,
        Unit("flux1_dev", how, "train", samples=2, steps=2): 1.2,
        Unit("flux1_dev", full, "train"): 0.1,
        Unit("flux1_dev", Build(tiling=False), "decode"): 0.05,
    }
    machine = {"gpu": "NVIDIA H200", "matmul_tflops": 788.0}
    table = {unit.key: facts | {"seconds": taken} for unit, taken in rows.items()}
    results = real_size.Results(tmp_path / "rows.json", machine, table)
    (tmp_path / "h200.yaml").write_text(real_size.planner_rows(results, list(rows)))
    hardware = parse_hardware(configuration.load(words).settings.hardware)
    found, plain = with_measured(hardware, work, tmp_path), Costs(work, hardware)
    assert found.seconds == {"decode": {"h200": pytest.approx(0.05)}}
    (pool,), costs = found.pools, Costs(work, found)
    # eager rows of LoRA; the largest decides
    assert costs.step_seconds(pool, 8) == pytest.approx(0.8)
    assert costs.cell_seconds(pool, 2, 2, Recompute(inputs=1.0)) == pytest.approx(0.6)
    kept = costs.cell_seconds(pool, 2, 5, Recompute())
    assert kept < 0.6, "another recomputation has other seconds"
    computed = [plain.cell_seconds(plain.hardware.pools[0], 2, k, r)
                for k, r in ((5, Recompute()), (2, Recompute(inputs=1.0)))]  # fmt: skip
    assert kept == pytest.approx(0.6 * computed[0] / computed[1])
    assert costs.figure_source("train", pool) == costs.figure_source("decode", pool) == "measured"
    assert costs.figure_source("encode", pool) == "assumed"
    given = replace(hardware, seconds={"train": {"h200": 9.0}})
    costs = Costs(work, with_measured(given, work, tmp_path))
    assert costs.cell_seconds(pool, 2, 2, Recompute()) == 18.0, "the profile's own go first"
    assert with_measured(hardware, replace(work, height=1024), tmp_path) == hardware, (
        "other sizes stay computed"
    )


@pytest.mark.parametrize(
    ("profile", "driver", "same"),
    [
        ("H200", "h200", True),
        ("H100-SXM", "h100_80gb_hbm3", True),
        ("H100-SXM", "h100_pcie", False),
        ("A100-SXM-80GB", "a100_sxm4_80gb", True),
        ("L40", "l40s", False),
        ("RTX-4090-48GB", "geforce_rtx_4090", True),
        ("cpu", "h200", False),
    ],
)
def test_a_profile_s_gpu_is_found_under_the_driver_s_name(
    profile: str, driver: str, same: bool
) -> None:
    assert same_gpu(profile, driver) is same


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("size=real", "real needs a GPU"),
        ("models=sd", "known: .*flux1_dev"),
        ("engines=fast", "known: eager"),
    ],
)
def test_what_cannot_be_measured_is_refused(word: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=part):
        real_size.main([word, f"out={tmp_path}"])


# ---- a GPU that does not exist


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILY)
def test_the_forward_path_at_real_size_on_a_gpu_that_does_not_exist(model: str) -> None:
    device = torch.device("cuda", 0)
    settings = composed(model, REAL, *Build().words).settings.tree.model
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        mock.patch.object(nn.Module, "_apply", plainly),
        fake,
        random_weights(model, REAL, device),
        torch.no_grad(),
    ):
        policy = configuration.instantiate(settings)
        assert {parameter.device for parameter in policy.parameters()} == {device}
        row, facts = ROWS[FAMILY[model]], policy.facts()
        if row.counts_tokens or "mask" in facts.conditioning:  # what encoders do depends on values
            condition = {
                key: torch.ones(1, *shape, device=device, dtype=torch.bfloat16)
                for key, shape in _families.conditioning(facts, policy, *row.real_text).items()
                if key != "mask"
            }
            condition |= (
                {NEGATIVE + key: value for key, value in condition.items()}
                if policy.two_forwards
                else {}
            )
        else:
            condition = policy.codec.encode([PROMPT])
        assert {value.device for value in condition.values()} == {device}
        latents, sigmas = (
            torch.randn(2, *policy.latent_shape, device=device),
            torch.full((2,), 0.5, device=device),
        )
        velocity = policy.velocity(latents, sigmas, denoise.expand_condition(condition, 2))
        assert (velocity.device, velocity.dtype, velocity.shape) == (
            device,
            torch.float32,
            latents.shape,
        )
        media = policy.codec.decode(latents[:1])
        assert media.device == device
        assert media.shape[-2:] == (settings.height, settings.width)
        real = sum(
            parameter.numel()
            for name, parameter in policy.transformer.named_parameters()
            if "lora_" not in name
        )
    with torch.device("meta"):
        assert real == sum(parameter.numel() for parameter in _families.network(model).parameters())
