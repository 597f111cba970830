"""The planner's speeds against published ones: model / published for every row of a table.

    python -m benchmarks.calibration [rows=FILE]

`rows` is a CSV with the columns of src/digenrl/extensions/planner/published.csv, the default: family,
parameters in billions, pixels, frames, steps, passes of guidance, batch, GPU, engine, measured
figure, unit, source. Training rows may add: trained weights (full, or the rank of LoRA), GPUs that
share the weights, K (time steps in a forward), recomputation (auto, true, false), GiB of a GPU.

| unit | figure |
|---|---|
| s/sample | denoising, conditioning and decode |
| s/step, s/forward | one denoising step; one pass |
| s/trained_step | forward and backward of one time step of the batch |
| gain | seconds of a trained step at K = 1 / at K |
| share | of the GPU's peak: FLOPs of a forward, or of a trained step without recomputation |

Forward and training rows are printed apart. `seen` rows stand in published.csv, and the planner's
figures (gpus.py) were chosen with them in view. `held out` is the same ratio with figures fitted
anew, without any row of that row's source. For a forward these are generate, attention and
fused_attention of the kind of GPU. For a trained step they are train and hidden of all GPUs. Rows
that are not seen are held out by themselves. A row of an unknown model or GPU is named, and not
counted.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path

from benchmarks._shared import options
from digenrl.extensions.planner.costing import Costing
from digenrl.extensions.planner.counts import backward_flops, forward_flops
from digenrl.extensions.planner.gpus import ENGINES, Efficiency, find_gpu
from digenrl.extensions.planner.workload import Workload, counted_models
from digenrl.hardware import Hardware, Pool
from digenrl.recompute import Recompute

FAMILIES = {
    "flux": "flux1_dev",
    "flux1": "flux1_dev",
    "sd35": "sd35_medium",
    "sd3.5": "sd35_medium",
    "hunyuan_video_15": "hunyuan_video15",
}
"""Family of a row -> option of configs/model, where the name is another."""
FORWARD, TRAINING = "forward", "training"
UNITS = ("s/sample", "s/step", "s/forward", "s/trained_step", "gain", "share")
KEYS = {FORWARD: ("generate", "attention", "fused_attention"), TRAINING: ("train", "hidden")}
"""Figures that are fitted to each stage's rows."""
CHOICES = tuple(step / 20 for step in range(1, 21))
RECOMPUTE = {"auto": None, "true": Recompute(inputs=1.0), "false": Recompute()}
Row = Mapping[str, str]


def stage(row: Row) -> str:
    """Stage of a row: what names trained weights is training."""
    return TRAINING if row.get("weights") else FORWARD


def predicted(row: Row, figures: Mapping[str, float] | None = None) -> float:
    """The figure of a row by the planner's cost model, with other `figures` of the GPU's kind.

    Raises:
        ValueError: a model, a GPU, an engine or a unit that is not known.
    """
    gpu, model = find_gpu(row["gpu"]), FAMILIES.get(row["family"], row["family"])
    if (
        gpu is None
        or model not in counted_models()
        or row["engine"] not in ENGINES
        or row["unit"] not in UNITS
    ):
        raise ValueError("unknown family, gpu, engine or unit")
    gpus, given = int(row.get("gpus") or 1), tuple((figures or {}).items())
    intra = 450.0 if gpu.kind in ("hopper", "h20") else 32.0
    memory = float(row.get("memory_gib") or 80)
    speeds = (gpu.tflops, gpu.hbm_tb_s, intra, 50)
    pool = Pool("p", row["gpu"], gpus, "auto", memory, *speeds, 8, efficiency=given)
    width, height = map(int, row["px"].split("x"))
    weights, k = row.get("weights") or "full", int(row.get("k") or 1)
    work = Workload(
        model=model,
        height=height,
        width=width,
        frames=int(row["frames"]),
        steps=int(row["steps"]),
        trained_steps=k,
        prompts=1,
        group_size=int(row["batch"]),
        updates=1,
        guidance=int(row["cfg_passes"]) > 1,
        lora_rank=None if weights == "full" else int(weights),
        engine=row["engine"],
        fused_attention=row["engine"] != "eager",
        passes_apart=stage(row) == FORWARD,
    )
    costing, batch = Costing(work, Hardware((pool,))), int(row["batch"])
    flops = batch * work.passes * forward_flops(work)
    if stage(row) == FORWARD:
        costs, step = costing.costs, costing.costs.step_seconds(pool, batch)
        if row["unit"] == "share":
            return flops / step / (pool.tflops * 1e12)
        if row["unit"] == "s/sample":
            rest = costs.encode_seconds(pool) + costs.decode_seconds(pool, batch)
            return work.steps * step + rest
        return step if row["unit"] == "s/step" else step / work.passes
    one, several = (
        costing.cell_seconds(
            costing.make_candidate(
                gpus,
                0,
                sharding="fsdp" if gpus > 1 else "ddp",
                task_size=batch,
                tsp_batch=steps,
                gap=0,
                recompute=RECOMPUTE[row.get("recompute") or "auto"],
            )
        )
        for steps in (1, k)
    )
    if row["unit"] == "share":
        flops += batch * work.passes * backward_flops(work)
        return flops / several / (pool.tflops * 1e12)
    return one / several if row["unit"] == "gain" else several


def ratio(row: Row, figures: Mapping[str, float] | None = None) -> float:
    """Model / published."""
    return predicted(row, figures) / float(row["measured_s"])


def fitted(rows: Iterable[Row], keys: tuple[str, ...]) -> dict[str, float]:
    """The figures of `keys` with the least mean of |log(model / published)| over `rows`.

    They are searched one by one from those of an unknown GPU, which is what no row leaves.
    """
    figures = {key: float(getattr(Efficiency(), key)) for key in keys}
    rows = list(rows)

    def error(trial: Mapping[str, float]) -> float:
        return sum(abs(math.log(ratio(row, trial))) for row in rows)

    for _ in range(3 if rows else 0):
        for key in keys:
            choices: list[dict[str, float]] = [figures | {key: value} for value in CHOICES]
            figures = min(choices, key=error)
    return figures


def held_out(row: Row, seen: Iterable[Row], known_fits: dict[object, dict[str, float]]) -> float:
    """Model / published of a seen row, with figures fitted without the rows of its source."""
    kind, source, gpu = stage(row), row["source"].split()[0], find_gpu(row["gpu"])
    assert gpu is not None
    alike: Callable[[Row], bool] = lambda other: (  # noqa: E731
        stage(other) == kind
        and other["source"].split()[0] != source
        and (kind == TRAINING or getattr(find_gpu(other["gpu"]), "kind", None) == gpu.kind)
    )
    key = (kind, source, gpu.kind if kind == FORWARD else "")
    if key not in known_fits:
        known_fits[key] = fitted(filter(alike, seen), KEYS[kind])
    return ratio(row, known_fits[key])


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a table."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def identity(row: Row) -> tuple[str, ...]:
    """What tells rows apart."""
    keys = ("family", "px", "frames", "steps", "cfg_passes", "batch", "gpu", "engine", "unit")
    return *(row[key] for key in keys), *(row.get(key) or "" for key in ("weights", "gpus", "k"))


def counts(name: str, ratios: list[float], share: float) -> str:
    """How many ratios are near 1."""
    within = sum(1 - share <= ratio <= 1 + share for ratio in ratios)
    return f"{name}within {share:.0%}: {within} of {len(ratios)}"


def main(words: list[str]) -> int:
    """Print the tables; returns the exit code."""
    shipped = Path(str(resources.files("digenrl.extensions.planner").joinpath("published.csv")))
    given = options(words, {"rows": str(shipped)}, {})
    seen, rows = read(shipped), read(Path(given["rows"]))
    names, fits = {identity(row) for row in seen}, dict[object, dict[str, float]]()
    for kind in (FORWARD, TRAINING):
        own = [row for row in rows if stage(row) == kind]
        if not own:
            continue
        print(f"{kind} rows\n{'model/published':>15} {'held out':>8} {'model':>9} {'published':>9}")
        ratios, apart, gains = [], [], []
        for row in own:
            words = [row[key] for key in ("family", "px", "frames", "steps", "cfg_passes", "batch")]
            words += [row["gpu"], row["engine"], row["unit"]]
            words += [f"{key}={row[key]}" for key in ("weights", "gpus", "k") if row.get(key)]
            name = " ".join(words)
            try:
                figure = predicted(row)
            except ValueError as error:
                print(f"{'-':>15} {'-':>8} {'-':>9} {row['measured_s']:>9}  {name}: {error}")
                continue
            published = float(row["measured_s"])
            ratios.append(figure / published)
            is_seen = identity(row) in names
            apart.append(held_out(row, seen, fits) if is_seen else ratios[-1])
            if row["unit"] == "gain":
                gains.append(apart[-1])
            print(
                f"{ratios[-1]:>15.2f} {apart[-1]:>8.2f} {figure:>9.3f} {published:>9g}  {name}"
                + (" (seen)" if is_seen else "")
            )
        for share in (0.35, 0.25):
            print(counts("", ratios, share), counts("held out ", apart, share), sep="; ")
        if gains:
            print(counts("TSP gains, held out, ", gains, 0.15))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
