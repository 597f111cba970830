"""Detectors for GenEval's rules: a user's model from transformers, and the detector of the embedded
drawn scenes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torchvision.ops import nms
from torchvision.transforms.functional import to_pil_image

from digenrl import accelerator
from digenrl.extensions.bench.files import SuiteError
from digenrl.extensions.bench.geneval import COLOURS, Detection
from digenrl.model_folder import require_data
from reward_models.drawn_scenes import AREA, EXTENT, SHAPES
from reward_models.scene_judges import Found, detect

if TYPE_CHECKING:
    from transformers import Pipeline

ALIASES = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}
"""GenEval's name of a class -> COCO's name."""


class TransformersDetector:
    """Detector from transformers, with a CLIP model for colours.

    Some detectors take class names as text (OWL-ViT, OWLv2, Grounding DINO) and get those of the
    suite's line. Others (DETR, YOLOS, RT-DETR) must know the classes already, under GenEval's or
    COCO's names.

    Args:
        path: directory of the detector.
        colours: directory of the CLIP model; None = lines that ask for colours cannot be scored.
        least: lowest score of a detection that counts.
        max_overlap: largest intersection over union of two boxes of a class. Of boxes that overlap
            more, only the one with the highest score stays.

    Raises:
        SuiteError: the directory does not exist or holds no such model.
    """

    def __init__(self, path: Path, colours: Path | None, least: float, max_overlap: float) -> None:
        from transformers import MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING, AutoConfig

        require_data(path)
        self._least, self._max_overlap = least, max_overlap
        self._in_words = (
            path.is_dir()
            and type(AutoConfig.from_pretrained(path, local_files_only=True))
            in MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING
        )
        self._detect = _load_pipeline(
            "zero-shot-object-detection" if self._in_words else "object-detection", path, "detector"
        )
        self._known = {} if self._in_words else dict(self._detect.model.config.label2id)
        self._colour = (
            None
            if colours is None
            else _load_pipeline("zero-shot-image-classification", colours, "colours")
        )

    @property
    def networks(self) -> list[nn.Module]:
        """Return the modules, whose weights identify the detector."""
        return [found.model for found in (self._detect, self._colour) if found is not None]

    def find_objects(self, picture: Tensor, classes: Sequence[str]) -> list[Detection]:
        """See `digenrl.extensions.bench.geneval.Detector`.

        Raises:
            SuiteError: a class that the detector does not know.
        """
        asked = {
            name if self._in_words or name in self._known else ALIASES.get(name, name): name
            for name in classes
        }
        if unknown := [] if self._in_words else [own for own in asked if own not in self._known]:
            raise SuiteError(
                f"detector: knows no class {unknown[0]!r} (it knows "
                f"{', '.join(list(self._known)[:8])} ...); take one "
                "that was trained on COCO, or one that is asked in words, such as OWLv2."
            )
        options = {"candidate_labels": list(asked)} if self._in_words else {}
        answers = self._detect(to_pil_image(picture), threshold=self._least, **options)
        found = [
            Detection(asked[answer["label"]], _box_corners(answer["box"]), float(answer["score"]))
            for answer in answers
            if answer["label"] in asked
        ]
        return [found[row] for name in classes for row in self._without_overlaps(found, name)]

    def _without_overlaps(self, found: Sequence[Detection], label: str) -> list[int]:
        """Return the rows of `found` with this label, without boxes that overlap a box of higher
        score."""
        rows = [row for row, one in enumerate(found) if one.label == label]
        boxes = torch.tensor([found[row].box for row in rows], dtype=torch.float32).reshape(-1, 4)
        scores = torch.tensor([found[row].score for row in rows], dtype=torch.float32)
        return [rows[int(i)] for i in nms(boxes, scores, self._max_overlap)]

    def name_colours(self, picture: Tensor, found: Sequence[Detection]) -> list[str | None]:
        """Return CLIP's colour for each box.

        Raises:
            SuiteError: there is no CLIP model.
        """
        if self._colour is None:
            raise SuiteError(
                "colours: the suite asks for colours; name a CLIP model's directory: colours=PATH."
            )
        image = to_pil_image(picture)
        return [
            self._colour(
                image.crop(_whole_pixels(one.box)),
                candidate_labels=list(COLOURS),
                hypothesis_template=f"a photo of a {{}} {one.label}",
            )[0]["label"]
            for one in found
        ]


def _whole_pixels(box: tuple[float, float, float, float]) -> tuple[int, int, int, int]:
    """Return whole pixels, at least one each way."""
    left, top, right, bottom = map(round, box)
    return left, top, max(right, left + 1), max(bottom, top + 1)


def _box_corners(box: Mapping[str, float]) -> tuple[float, float, float, float]:
    return box["xmin"], box["ymin"], box["xmax"], box["ymax"]


def _load_pipeline(task: str, path: Path, key: str) -> Pipeline:
    from transformers import pipeline

    if not path.is_dir():
        raise SuiteError(
            f"{key}={path}: is no directory; download a model for {task} and name its directory."
        )
    try:
        require_data(path)
        return pipeline(
            task,
            model=str(path),
            device=accelerator.device_kind(),
            model_kwargs={"use_safetensors": True},
        )
    except (OSError, ValueError, KeyError) as error:
        raise SuiteError(f"{key}={path}: no model for {task} could be loaded ({error}).") from error


class SceneObjects:
    """Detector of the embedded drawn scenes. An object's labels are its shape, its colour and
    shape, and `object`."""

    def find_objects(self, picture: Tensor, classes: Sequence[str]) -> list[Detection]:
        """Return the objects as `digenrl.extensions.bench.geneval.Detector` says."""
        objects = detect(picture[None])[0]
        return [
            Detection(label, _object_box(one))
            for one in objects
            for label in ("object", str(one.shape), f"{one.colour} {one.shape}")
            if label in classes
        ]

    def name_colours(self, picture: Tensor, found: Sequence[Detection]) -> list[str | None]:
        """Return the colours that the scenes' judge sees."""
        known = {_object_box(one): one.colour for one in detect(picture[None])[0]}
        return [known[one.box] for one in found]


def _object_box(one: Found) -> tuple[float, float, float, float]:
    """Return the box of an object from its centroid, area and shape; an unknown shape counts as a
    circle."""
    shape = SHAPES.index(one.shape) if one.shape else 0
    left, right, up, down = (EXTENT[shape] * (one.area / AREA[shape]).sqrt()).tolist()
    return one.x - left, one.y - up, one.x + right, one.y + down
