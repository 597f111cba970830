"""Judges and statistics of the drawn scenes: does a picture show what its prompt asserts, and are
they still diverse?

The reward is a detector that can be verified by hand: connected objects, their colour, the best of
three templates, their places. It is a share of assertions, so that half a scene scores half. The
held-out judge is a small network that learned from real scenes alone. It sees whole pictures,
shares nothing with the detector, and is never optimised. If only the detector rises, the reward is
hacked. Neither judge sees collapse: `SceneStatistics` does. What a prompt asserts is its `target`,
where it has one (an edit), else its text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from scipy import ndimage
from torch import Tensor, nn

from digenrl.types import Prompt
from reward_models.drawn_scenes import (
    AREA,
    COLOURS,
    KINDS,
    PALETTE,
    PAPER,
    SHAPES,
    SIDE,
    Scene,
    asked_scene,
    cover,
    draw,
    draw_places,
    margin,
)

JUDGE_FILE = Path(__file__).with_name("scene_judge.safetensors")
COUNTS = 4
"""The judge counts the objects of a kind: 0, 1, 2, or more."""
OFF_PAPER, LEAST_PIXELS = 0.3, 4
"""An object: at least so many connected pixels, each so far from the paper's colour (RGB in [0,
1])."""
NEAR_COLOUR, EVEN_COLOUR = 0.25, 0.2
"""Largest distance of an object's mean from a colour, and largest spread, at which the object has
that colour."""
LIKE_SHAPE, CLEARLY = 0.78, 0.02
"""Least overlap (intersection over union) with a shape's template, and least lead over the other
shapes, at which an object has that shape."""


class Found(NamedTuple):
    """An object in a picture."""

    x: float
    y: float
    area: float
    """Pixels."""
    colour: str | None
    """None: none of those that are known."""
    shape: str | None


def detect(pictures: Tensor) -> list[list[Found]]:
    """Return the objects of pictures [N, 3, 24, 24] in [0, 1], picture by picture."""
    pixels = pictures.permute(0, 2, 3, 1).numpy()
    far = np.linalg.norm(pixels - PAPER.numpy(), axis=-1)
    joined = np.zeros((3, 3, 3), bool)
    joined[1] = True  # diagonal neighbours too, and only within a picture
    labels, _ = ndimage.label(far > OFF_PAPER, joined)
    found: list[list[Found]] = [[] for _ in pixels]
    for number, (picture, *_) in enumerate(ndimage.find_objects(labels), start=1):
        mask = labels[picture.start] == number
        if mask.sum() >= LEAST_PIXELS:
            found[picture.start].append(
                _object(pixels[picture.start], np.where(mask, far[picture.start], 0.0))
            )
    return found


def _object(picture: np.ndarray, depth: np.ndarray) -> Found:
    """Return the object that stands out by `depth` [24, 24] (0 elsewhere) from the paper of
    `picture` [24, 24, 3]."""
    inside = depth > 0.7 * np.sort(depth, axis=None)[-3]
    mean, spread = picture[inside].mean(0), picture[inside].std(0)
    distance = np.linalg.norm(PALETTE.numpy() - mean, axis=1)
    colour = list(COLOURS)[distance.argmin()] if distance.min() < NEAR_COLOUR else None
    colour = colour if np.linalg.norm(spread) < EVEN_COLOUR else None
    covered = np.clip(depth / max(1e-3, float(np.linalg.norm(mean - PAPER.numpy()))), 0, 1)
    area, at = covered.sum(), np.arange(SIDE) + 0.5
    x, y = (covered.sum(0) * at).sum() / area, (covered.sum(1) * at).sum() / area
    radius = (area / AREA).sqrt()
    templates = cover(
        torch.arange(3), torch.stack([torch.full((3,), x), torch.full((3,), y), radius], 1)
    ).numpy()
    like = np.minimum(templates, covered).sum((1, 2)) / np.maximum(templates, covered).sum((1, 2))
    second, best = np.sort(like)[-2:]
    is_shape = best > LIKE_SHAPE and best - second > CLEARLY and area > 12
    return Found(
        float(x), float(y), float(area), colour, SHAPES[like.argmax()] if is_shape else None
    )


def share_of_assertions(found: Sequence[Found], scene: Scene) -> float:
    """Return the share of the assertions of `scene` that `found` fulfils. The number of objects and
    the relation count 2 each, colour and shape of each object 1 each. The assignment of objects is
    the one that fulfils most."""
    best, places = 0, [torch.tensor([o.x, o.y]) for o in found]
    for chosen in itertools.permutations(
        [*range(min(4, len(found))), *[None] * len(scene.kinds)], len(scene.kinds)
    ):
        pairs = [
            (found[i], kind) for i, kind in zip(chosen, scene.kinds, strict=True) if i is not None
        ]
        hits = sum((o.colour == colour) + (o.shape == shape) for o, (colour, shape) in pairs)
        if scene.relation and len(pairs) == 2:
            first, second = (places[i] for i in chosen if i is not None)
            hits += 2 * bool(margin(first, second, scene.relation) > 0)
        best = max(best, hits)
    asserted = 2 + 2 * len(scene.kinds) + 2 * bool(scene.relation)
    return (best + 2 * (len(found) == len(scene.kinds))) / asserted


def require_scenes(prompts: Sequence[Prompt]) -> None:
    """Raise ValueError for a prompt that asks for no drawn scene."""
    for prompt in prompts:
        asked_scene(prompt.target or prompt.text)


class _Reads24x24:
    """What both judges ask of their input."""

    @staticmethod
    def check_prompts(prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for a prompt that asks for no drawn scene."""
        require_scenes(prompts)

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Score pictures [b, 3, 24, 24] in [0, 1] against their prompts -> [b] fp32 on the CPU.

        Raises:
            ValueError: another picture shape, a prompt count that differs from the batch's, or a
                prompt that asks for no drawn scene.
        """
        if media.ndim != 4 or tuple(media.shape[1:]) != (3, SIDE, SIDE):
            raise ValueError(
                f"scene judges read pictures [b, 3, 24, 24], got {list(media.shape)}; use "
                "model=scenes"
            )
        if len(prompts) != len(media):
            raise ValueError(
                f"{len(media)} pictures but {len(prompts)} prompts; give one prompt per picture"
            )
        scenes = [asked_scene(prompt.target or prompt.text) for prompt in prompts]
        return self.judge(media.detach().to("cpu", torch.float32), scenes)

    def judge(self, pictures: Tensor, scenes: Sequence[Scene]) -> Tensor:
        raise NotImplementedError


class SceneDetector(_Reads24x24):
    """The reward: share of the prompt's assertions that the detector confirms; 1.0 = all.

    Args:
        perfect: score 1.0 where all hold and 0.0 elsewhere.
    """

    def __init__(self, perfect: bool = False) -> None:
        self._perfect = perfect

    def judge(self, pictures: Tensor, scenes: Sequence[Scene]) -> Tensor:
        shares = [
            share_of_assertions(found, scene)
            for found, scene in zip(detect(pictures), scenes, strict=True)
        ]
        return torch.tensor([float(share == 1.0) if self._perfect else share for share in shares])


def build_judge() -> nn.Sequential:
    """Return the untrained judge: four convolutions, 0.26M parameters. It maps [B, 3, 24, 24] in
    [0, 1] to [B, 12 * 6]: for each kind, the logits of its count and the mean centre of its objects
    / 24."""
    blocks: list[nn.Module] = []
    for inner, outer, stride in ((3, 24, 1), (24, 48, 2), (48, 64, 2), (64, 64, 1)):
        blocks += [nn.Conv2d(inner, outer, 3, stride, 1), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(
        *blocks, nn.Flatten(), nn.Dropout(0.1), nn.Linear(64 * 36, len(KINDS) * (COUNTS + 2))
    )


@lru_cache(maxsize=2)
def load_judge(path: Path = JUDGE_FILE) -> nn.Sequential:
    """Return the committed judge, or one from `path`.

    Raises:
        FileNotFoundError: there is none.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no scene judge at {path}; run `make pretrain-scenes`")
    model = build_judge()
    model.load_state_dict(
        {name: value.float() for name, value in load_file(path).items()}, strict=False
    )
    return model.eval().requires_grad_(False)


class SceneJudge(_Reads24x24):
    """The held-out judge: 1.0 where it counts exactly the asked objects and finds them in the asked
    relation."""

    def __init__(self, path: str | None = None) -> None:
        self.model = load_judge(JUDGE_FILE if path is None else Path(path))

    def judge(self, pictures: Tensor, scenes: Sequence[Scene]) -> Tensor:
        with torch.no_grad():
            out = self.model(2 * pictures - 1).view(len(pictures), len(KINDS), COUNTS + 2)
        counts, centres = out[..., :COUNTS].argmax(2), out[..., COUNTS:]
        right = torch.zeros(len(pictures))
        for row, scene in enumerate(scenes):
            asked = torch.tensor([scene.kinds.count(kind) for kind in KINDS])
            holds = bool((counts[row] == asked).all())
            if holds and scene.relation:
                first, second = (centres[row, KINDS.index(kind)] for kind in scene.kinds)
                holds = bool(margin(first, second, scene.relation) > 0)
            right[row] = holds
        return right


class SceneStatistics:
    """What the mean scores do not show, over an evaluation set.

    * `perfect`, `judge`: share of pictures for which every assertion holds, by the detector and by
      the held-out judge. Both also as `.../seen` and `.../unseen`: over prompts without and with
      kinds that are never asked for in training.
    * `diversity_ratio`: mean pairwise L2 among the pictures of a prompt, relative to real scenes of
      it.
    * `place_ratio`: the same for the places of objects, by the deviation of a scene's centre.
      Towards 0 = all alike.
    """

    @staticmethod
    def check_prompts(prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for a prompt that asks for no drawn scene."""
        require_scenes(prompts)

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Statistics of pictures [N, 3, 24, 24] in [0, 1] and their N prompts."""
        pictures = media.detach().to("cpu", torch.float32)
        scenes = [asked_scene(prompt.target or prompt.text) for prompt in prompts]
        seen = torch.tensor([scene.seen for scene in scenes])
        numbers: dict[str, float] = {}
        for name, judge in (("perfect", SceneDetector(perfect=True)), ("judge", SceneJudge())):
            right = judge.judge(pictures, scenes)
            groups = {name: right, f"{name}/seen": right[seen], f"{name}/unseen": right[~seen]}
            numbers |= {key: float(values.mean()) for key, values in groups.items() if len(values)}
        places = draw_places(scenes, torch.Generator().manual_seed(0))
        real = draw([scene.kinds for scene in scenes], places)
        (own, where), (like, there) = spread(pictures, scenes), spread(real, scenes)
        return numbers | {"diversity_ratio": own / like, "place_ratio": where / there}


def spread(pictures: Tensor, scenes: Sequence[Scene]) -> tuple[float, float]:
    """Return (mean pairwise L2, root mean variance of the scenes' centres in pixels) among the
    pictures of one scene."""
    distances, variances, found = [], [], detect(pictures)
    for scene in dict.fromkeys(scenes):
        rows = [row for row, other in enumerate(scenes) if other == scene]
        centres = [
            [np.mean([o.x for o in found[row]]), np.mean([o.y for o in found[row]])]
            for row in rows
            if found[row]
        ]
        if len(rows) > 1:
            distances.append(float(torch.pdist(pictures[rows].flatten(1)).mean()))
        if len(centres) > 1:
            variances.append(float(np.var(centres, axis=0, ddof=1).mean()))
    return float(np.mean(distances)), float(np.sqrt(np.mean(variances)))
