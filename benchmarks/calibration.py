"""The planner's speeds against published ones: model / published for every row of a table.

    python -m benchmarks.calibration [rows=FILE]

`rows` is a CSV of the layout of src/digenrl/extensions/planner/published.csv, which is the default:
family, parameters in billions, pixels, frames, steps, passes of guidance, batch, GPU, engine,
measured seconds, their unit and source. s/sample = denoising, conditioning and decode; s/step = one
denoising step; s/forward = one pass. Prints a line per row and `within 25%: N of M`. A row of an
unknown model or GPU is named, and not counted.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from benchmarks._shared import options
from digenrl.extensions.planner.costs import Costs
from digenrl.extensions.planner.gpus import ENGINES, known
from digenrl.extensions.planner.workload import Workload, counted
from digenrl.hardware import Hardware, Pool

FAMILIES = {
    "flux": "flux1_dev",
    "flux1": "flux1_dev",
    "sd35": "sd35_medium",
    "sd3.5": "sd35_medium",
}
"""Family of a row -> option of configs/model, where the name is another."""
UNITS = ("s/sample", "s/step", "s/forward")


def predicted(row: Mapping[str, str]) -> float:
    """Seconds of a row by the planner's cost model.

    Raises:
        ValueError: a model, a GPU, an engine or a unit that is not known.
    """
    gpu, model = known(row["gpu"]), FAMILIES.get(row["family"], row["family"])
    if (
        gpu is None
        or model not in counted()
        or row["engine"] not in ENGINES
        or row["unit"] not in UNITS
    ):
        raise ValueError("unknown family, gpu, engine or unit")
    pool = Pool("p", row["gpu"], 1, "auto", 80, gpu.tflops, gpu.hbm_tb_s, 32, 25, 1)
    width, height = map(int, row["px"].split("x"))
    work = Workload(
        model=model,
        height=height,
        width=width,
        frames=int(row["frames"]),
        steps=int(row["steps"]),
        trained_steps=1,
        prompts=1,
        group_size=1,
        updates=1,
        guidance=int(row["cfg_passes"]) > 1,
        lora_rank=None,
        engine=row["engine"],
        fused_attention=row["engine"] != "eager",
        passes_apart=True,
    )
    costs, batch = Costs(work, Hardware((pool,))), int(row["batch"])
    step = costs.step_seconds(pool, batch)
    if row["unit"] == "s/sample":
        return work.steps * step + costs.encode_seconds(pool) + costs.decode_seconds(pool, batch)
    return step if row["unit"] == "s/step" else step / work.passes


def main(words: list[str]) -> int:
    """Print the table; returns the exit code."""
    given = options(
        words,
        {"rows": str(resources.files("digenrl.extensions.planner").joinpath("published.csv"))},
        {},
    )
    with Path(given["rows"]).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    ratios = []
    print(f"{'model/published':>15}  {'model s':>9}  {'publ. s':>9}  row")
    for row in rows:
        name = " ".join(
            row[key]
            for key in ("family", "px", "frames", "steps", "cfg_passes", "batch", "gpu", "engine")
        )
        try:
            seconds = predicted(row)
        except ValueError as error:
            print(f"{'-':>15}  {'-':>9}  {row['measured_s']:>9}  {name}: {error}")
            continue
        ratios.append(seconds / float(row["measured_s"]))
        print(f"{ratios[-1]:>15.2f}  {seconds:>9.3f}  {row['measured_s']:>9}  {name} {row['unit']}")
    for share in (0.35, 0.25):
        within = sum(1 - share <= ratio <= 1 + share for ratio in ratios)
        print(f"within {share:.0%}: {within} of {len(ratios)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
