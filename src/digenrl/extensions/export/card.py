"""Write the model card of an export: base and training, results, and how to load the weights."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import diffusers
from jinja2 import Environment, PackageLoader, StrictUndefined

from digenrl.extensions.export.diffusers_export import component_network, lora_file
from digenrl.models.policy import Policy
from digenrl.record.run_dir import SAMPLES, atomic_replace, printable_text
from digenrl.record.small_file import json_object, read_text
from digenrl.report.pictures import read_samples


def write_card(
    folder: Path,
    run: Path,
    config: Mapping[str, Any],
    policy: Policy,
    weights: str,
) -> Path:
    """Write README.md and copy the run's curves and before/after picture beside it.

    config: the run's configuration as plain values. policy: what was trained.
    weights: which weights these are. A picture that the run does not have is left out.
    """
    pictures = [run / SAMPLES / "before_after.png", *sorted((run / "plots").glob("*.png"))]
    shown = [path for path in pictures if path.exists()]
    for path in shown:
        with atomic_replace(folder / path.name) as unfinished:
            shutil.copyfile(path, unfinished)
    summary = run / "summary.json"
    numbers = json_object(read_text(summary)) if summary.exists() else {}
    pipeline = next(iter(policy.pipelines), None)
    settings = {key: config[key] for key in ("algorithm", "sampling", "data", "reward", "seed")}
    templates = Environment(
        loader=PackageLoader("digenrl.extensions.export", ""),
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    # A run may be foreign: its words stay words in YAML, Python and Markdown.
    templates.filters |= {"quoted": json.dumps, "plain": _escape_markdown}
    text = templates.get_template("card.md.j2").render(
        config=config,
        base=config["model"].get(
            "path"
        ),  # None: an embedded model, whose base weights only digenrl has
        build=config["model"].get("build"),
        source=f'ensure("{policy.family}")'
        if config["model"].get("build") == "tiny"
        else json.dumps(config["model"].get("path")),
        lora=config["model"].get("lora"),
        adapter=policy.adapter.lora is not None,
        files={subfolder: lora_file(subfolder) for subfolder in policy.components},
        numbers=numbers,
        sampled_with=Path(str(config["sampling"]["lora"])).name
        if config["sampling"].get("lora")
        else None,
        pictures=shown,
        pipeline=pipeline,
        by_pipeline=hasattr(getattr(diffusers, pipeline or "", None), "load_lora_weights"),
        settings=json.dumps(settings, indent=2).replace("`", r"\u0060"),
        transformer=type(
            component_network(policy, next(iter(policy.components.values())))
        ).__name__,
        weights=weights,
        prompt=_example_prompt(run),
        drawing=None if pipeline is None else _drawing_call(pipeline, config),
    )
    card = folder / "README.md"
    with atomic_replace(card) as unfinished:
        unfinished.write_text(text + "\n", encoding="utf-8")
    return card


def _example_prompt(run: Path) -> str:
    """Return a prompt of a readable evaluation of the run: embedded models know few words."""
    for kept in sorted((run / SAMPLES).glob("eval-*.npz")):
        with suppress(ValueError):
            return read_samples(kept).prompts[0]
    return "a prompt"


def _drawing_call(pipeline: str, config: Mapping[str, Any]) -> str:
    """Return the call with which a pipeline draws as the run's evaluations do: size, steps and
    guidance, as far as the pipeline takes them."""
    sampling, model = config["sampling"], config["model"]
    evaluated = sampling.get("eval") or {}
    known = {
        "height": sampling.get("height"),
        "width": sampling.get("width"),
        "num_frames": sampling.get("frames"),
        "num_inference_steps": evaluated.get("steps") or sampling.get("steps"),
        "guidance_scale": evaluated.get("guidance_scale") or sampling.get("guidance_scale"),
        "true_cfg_scale": model.get("true_cfg_scale"),
        "max_sequence_length": model.get("max_sequence_length"),
    }
    takes = inspect.signature(getattr(diffusers, pipeline).__call__).parameters
    said = [f"{key}={json.dumps(value)}" for key, value in known.items() if key in takes and value]
    image = ["image=SOURCE"] if "image" in takes else []
    words = ['prompt="a prompt"', *image, *said]
    return f"pipeline({', '.join(words)})[0]"


def _escape_markdown(value: object) -> str:
    """Return `value` escaped for Markdown, on one line."""
    text = " ".join(printable_text(str(value)).split())
    return re.sub(r"([\\`*\[\]<>#|~&]|\b_|_\b)", r"\\\1", text)
