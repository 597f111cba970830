"""docs/models_and_rewards.md, from the YAMLs, the counted sizes and the list of published weights
(`make docs`)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from digenrl.extensions.planner.workload import counted_models
from digenrl.rewards.published import WEIGHTS

ROOT = Path(__file__).resolve().parents[1]
_INTRODUCTION = """\
# Models and rewards

Made from `configs/model`, `configs/reward`, the counted sizes and the list of published weights by `make docs`. Every
model of the hub has a tiny build of the same classes (`hardware=cpu_tiny`), which needs no download. Licences are those
of the weights' publishers: read them on the page of the weights. `make plan EXP=... HW=...` says what fits where.
`digenrl train experiment=NAME hardware=NAME` trains an experiment; `hardware=cpu_tiny` tries it here. Networks without
counted blocks are committed with the code. *Gated*: accept the licence on the hub first. The token of a judge or a
service comes from an environment variable, never from a configuration.
"""  # noqa: E501
_TOLD_ONCE = {
    "Gated: accept the licence on the hub first.": "Gated.",
    "Gated: accept the licence on the hub.": "Gated.",
    " The token comes from the environment variable, never from here.": "",
    " `hardware.build=tiny` takes a small random CLIP.": "",
}
"""Sentence of several YAML files -> what the page says in its place."""

_HACKED = """
## How each is hacked

What a policy finds when a reward is all that counts: by what the reward measures, and by what papers report. Of these,
only the digits, the scenes and their edits were watched here. Against it: a KL weight, a `heldout:` reward of another
kind, a mixture, and looking at the report's best and worst.

| reward | what pleases it | what it does not see |
|---|---|---|
"""  # noqa: E501
_PLEASED = (
    (
        "pickscore`, `hpsv2`, `hpsv3`, `image_reward`, `preference",
        "gloss and detail everywhere, one style",
        "variety, counts",
    ),
    ("aesthetic", "soft light, painterly texture, portraits", "the prompt: it is not given it"),
    (
        "clip_score",
        "nouns of the prompt as textures, or written into the picture",
        "which thing has which colour",
    ),
    ("clap", "one loud event that the prompt names", "the picture, and when things sound"),
    (
        "ocr`, `ocr_clip",
        "letters that fill the picture, the word alone",
        "the scene around them, beauty",
    ),
    (
        "edits",
        "the asked change and nothing else that its pixels measure",
        "an edit that is right in another way",
    ),
    (
        "video_quality",
        "sharpened frames that drift slowly",
        "the prompt, and whether anything happens",
    ),
    (
        "video_align",
        "overexposure, cartoon looks (XueZeyue/DanceGRPO#41)",
        "frames between those it looks at",
    ),
    (
        "edit_reward",
        "gloss on the result, as other learned preferences",
        "small details: it sees 448 x 448 pixels",
    ),
    (
        "vlm_judge`, `edit_judge`, `pair_judge`, `unified_reward",
        "text in the picture that says what is asked for",
        "what its question leaves out",
    ),
    ("jpeg", "flat, smooth areas: it is a toy", "the prompt"),
    ("scenes_edit", "colours brighter than those asked for", "how exact a colour is"),
    (
        "digits`, `scenes",
        "one picture a prompt, the same places each time",
        "diversity; both report it beside",
    ),
)


def page() -> str:
    """The whole document, in Markdown."""
    models = [
        "| model | what it is | blocks x width | GiB in 16 bit | download | experiment |",
        "|---|---|---|---|---|---|",
        *_models(),
    ]
    rewards = ["| reward | what it measures | weights |", "|---|---|---|", *_rewards()]
    parts = [
        _INTRODUCTION,
        "## Models: `model=...`\n",
        *models,
        "\n## Rewards: `reward=...`\n",
        *rewards,
    ]
    hacked = "".join(
        f"| `{names}` | {pleased} | {unseen} |\n" for names, pleased, unseen in _PLEASED
    )
    return "\n".join(parts) + "\n" + _HACKED + hacked


def _models() -> Iterator[str]:
    for option, head, node in _options("model"):
        facts, path = counted_models().get(option), node.get("path")
        known = facts.models[option] if facts else None
        shape = f"{known['blocks']} x {known['hidden']}" if known else "-"
        gib = f"{known['parameters'] * 2 / 2**30:.1f}" if known else "-"
        command = f"`hf download {path}`" if path else "-"
        yield f"| `{option}` | {head} | {shape} | {gib} | {command} | `{_trained_by(option)}` |"


def _trained_by(model: str) -> str:
    """The first experiment of a model, Flow-GRPO before others."""
    chosen: dict[str, list[str]] = {}
    for path in sorted((ROOT / "configs/experiment").glob("[a-z]*.yaml")):
        text = path.read_text(encoding="utf-8")
        if found := re.search(r"override /model: (\w+)", text):
            chosen.setdefault(found[1], []).append(path.stem)
    named = chosen.get(model, [])
    plain = [name for name in named if name.endswith("flowgrpo")] or named
    return plain[0] if plain else f"{model}_flowgrpo"


def _rewards() -> Iterator[str]:
    for option, head, node in _options("reward"):
        parts = [*(node.get("rewards") or {}).values(), *(node.get("heldout") or {}).values()]
        scorers = [entry.get("scorer") or {} for entry in parts if isinstance(entry, dict)]
        sources = []
        for scorer in scorers:
            known = WEIGHTS.get(scorer.get("_target_", ""), {})
            sources += [f"`{source}`" for source in known.values()]
            asked = [key for key in ("path", "colours") if key in scorer and scorer[key] is None]
            if asked and not known:
                sources.append(f"yours: {' and '.join(f'`scorer.{key}`' for key in asked)}")
        yield f"| `{option}` | {head} | {', '.join(dict.fromkeys(sources)) or '-'} |"


def _options(group: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, its first comment, content) of every option of a group that a user may choose."""
    for path in sorted((ROOT / "configs" / group).glob("[a-z]*.yaml")):
        text = path.read_text(encoding="utf-8")
        comment = re.match(r"(?:# .*\n)+", text)
        head = (
            " ".join(comment[0].replace("\n# ", " ").removeprefix("# ").split()) if comment else ""
        )
        for sentence, short in _TOLD_ONCE.items():
            head = head.replace(sentence, short)
        node = yaml.safe_load(text)
        for parent in (
            name
            for name in node.get("defaults", [])
            if isinstance(name, str) and not name.startswith("_")
        ):
            inherited = path.with_name(f"{parent}.yaml")
            below = yaml.safe_load(inherited.read_text()) if inherited.exists() else {}
            node = OmegaConf.to_container(OmegaConf.merge(below, node))
        yield path.stem, head.replace("|", "\\|"), node


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
