"""Evaluate the same prompts and noise before, during and after training, with scorers that are
never optimised."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from numpy.typing import NDArray
from torch import Tensor

from digenrl.callbacks.picture_alarms import Looks, destroyed_warning, looks_of, of_pictures
from digenrl.data import load_prompts
from digenrl.images import edited_images as image_sources
from digenrl.record.run_dir import (
    EVALUATED,
    METRICS,
    SAMPLES,
    append_event,
    append_jsonl,
    atomic_replace,
    count_unwritten,
    own_folder,
    unix_time,
)
from digenrl.report.media import Track
from digenrl.report.page.logged import picture_logger
from digenrl.report.read_run import JsonlTail
from digenrl.rollout.engine import RolloutEngine
from digenrl.rollout.evaluation import FixedSamples, Pictures, join_pictures
from digenrl.types import Prompt

_LOG = logging.getLogger(__name__)
Statistic = Callable[[Tensor, Sequence[Prompt]], Mapping[str, float]]
"""Function (media [N, ...] in [0, 1], N prompts) -> {name: value}. Names become keys of the eval
line."""
GATHERED_BYTES = 64 << 20
"""Most bytes of each trainer's pictures that are on the GPUs at once while trainer 0 gathers."""


def eval_numbers(
    pictures: Pictures,
    weights: Mapping[str, float],
    statistics: Sequence[Statistic] = (),
) -> dict[str, float]:
    """Return the numbers of an eval line.

    `reward/<name>` is the mean of an optimised reward, and `reward` the weighted sum of these
    means. `reward` is NaN if the evaluation leaves a reward out, such as the votes of people.
    `heldout/<name>` is the mean of a reward without weight. `heldout` repeats the first of these
    means, and `heldout_error` is its standard error over samples. `missing` counts NaN scores,
    which no mean includes. `kl`, if it was measured, is in nats per sample between policy and base
    model. `noisy_detail`, if it was measured, is the detail of samples with the run's noise over
    that of clean ones (median).

    Raises:
        ValueError: two statistics give the same key.
    """
    means = {
        name: float(torch.nanmean(scores.double())) for name, scores in pictures.rewards.items()
    }
    numbers: dict[str, float] = {
        "reward": sum(weight * means.get(name, math.nan) for name, weight in weights.items())
    }
    numbers |= {f"reward/{name}": means[name] for name in weights if name in means}
    unoptimised = [name for name in means if name not in weights]
    if unoptimised:
        numbers["heldout"] = means[unoptimised[0]]
        numbers["heldout_error"] = _standard_error(pictures.rewards[unoptimised[0]])
        numbers |= {f"heldout/{name}": means[name] for name in unoptimised}
    if not bool(pictures.kl.isnan().all()):
        numbers["kl"] = float(torch.nanmean(pictures.kl.double()))
    if not bool(pictures.noisy.isnan().all()):
        numbers["noisy_detail"] = float(torch.nanmedian(pictures.noisy.double()))
    numbers["missing"] = sum(int(scores.isnan().sum()) for scores in pictures.rewards.values())
    numbers["samples"] = len(pictures.prompts)
    # Four bytes a value: of videos, tens of gigabytes that no one would read.
    media = pictures.media.float() / 255.0 if statistics else pictures.media
    for statistic in statistics:
        found = statistic(media, pictures.prompts)
        if repeated := sorted(set(found) & set(numbers)):
            raise ValueError(
                f"statistic {type(statistic).__name__} gives {repeated}, which the eval line has "
                "already"
            )
        numbers |= {name: float(value) for name, value in found.items()}
    return numbers


def _standard_error(scores: Tensor) -> float:
    """Return the standard error of the mean of `scores` [N] without NaN; 0 for fewer than two."""
    finite = scores[~scores.isnan()].double()
    return float(finite.std() / math.sqrt(len(finite))) if len(finite) > 1 else 0.0


def save_pictures(path: Path, pictures: Pictures, per_prompt: int) -> None:
    """Write the first `per_prompt` pictures of each prompt.

    The file holds `media` uint8 [N, ...], `prompts` (N texts) and scores [N]. If every prompt names
    an image, it also holds `sources` uint8 [N, 3, H, W]; if a reward needs sound, `sound` int16 [N,
    channels, samples] and `sound_rate` (Hz).

    Raises:
        OSError: the file cannot be written; no part of the file stays.
    """
    seen: dict[int, int] = {}
    kept = []
    for row, prompt in enumerate(pictures.prompts):
        seen[prompt.uid] = seen.get(prompt.uid, 0) + 1
        if seen[prompt.uid] <= per_prompt:
            kept.append(row)
    index = torch.tensor(kept)
    every = len(kept) == len(pictures.prompts)  # of videos, a copy would be gigabytes
    arrays = {
        "media": (pictures.media if every else pictures.media[index]).numpy(),
        "prompts": np.array([pictures.prompts[row].text for row in kept], dtype=np.str_),
    }
    if (sources := fitted_sources(pictures)) is not None:
        arrays["sources"] = np.stack([sources[row] for row in kept])
    if (track := track_of(pictures)) is not None:
        arrays |= {"sound": track.samples[kept], "sound_rate": np.array(track.rate)}
    scores = {name: values[index].numpy() for name, values in pictures.rewards.items()}
    own_folder(path.parent)
    # All trainers wait here: videos would be compressed for minutes, by a quarter.
    save: Any = np.savez_compressed if pictures.media.ndim == 4 else np.savez
    with atomic_replace(path) as unfinished, unfinished.open("wb") as file:
        save(file, **(scores | arrays))


def track_of(pictures: Pictures) -> Track | None:
    """Return the sound of the samples in 16 bits; None if no reward needs it."""
    if (sound := pictures.sound) is None:
        return None
    return Track(sound.waveform.mul(32767.0).round().to(torch.int16).numpy(), sound.rate)


def fitted_sources(pictures: Pictures) -> list[NDArray[np.uint8]] | None:
    """Return [3, H, W] for each sample: the image of its prompt, as large as the sample; None if a
    prompt names none."""
    height, width = pictures.media.shape[-2:]
    uids = [prompt.uid for prompt in pictures.prompts]
    fitted: dict[int, NDArray[np.uint8]] = {}
    for uid, prompt in dict(zip(uids, pictures.prompts, strict=True)).items():
        if not (images := image_sources(prompt.images)):
            return None
        fitted[uid] = np.moveaxis(np.asarray(images[0].fit_to_size(height, width)), -1, 0)
    return [fitted[uid] for uid in uids]


class Evaluation(pl.Callback):
    """Callback that samples fixed prompts with fixed noise at the start, every `every` RL steps and
    after the last step.

    Sampling is the plain ODE (`RolloutEngine.evaluate_prompts`). The noise depends on (seed,
    prompt, sample) only and uses no random generator of the run, so evaluating more or less often
    changes no weight.

    With `allocation.evaluation=rollouts`, rollouts draw and score the prompts while trainers go on.
    Trainers wait for the last prompt before their next update. Otherwise prompts are spread over
    trainer ranks, and every rank makes equally many forwards, as sharded weights need.

    Global rank zero writes a line of kind "eval" to metrics.jsonl, `samples/eval-<rl_step>.npz`,
    and `eval/...` to the loggers. Pictures are rounded to 8 bits before the statistics. So
    statistics can be recomputed from the file if it holds every sample.

    Args:
        prompts: the training prompts: a prompt file, or the name of one of the project's sets.
        heldout_prompts: prompts to evaluate in place of the training prompts; None = no held-out
            prompts.
        samples_per_prompt: samples of each prompt.
        every: RL steps between evaluations; 0 = only before and after.
        max_prompts: number of prompts to evaluate, the first of the file; None = all.
        seed: seed of the noise. It is equal in every run, so that runs compare sample by sample.
        steps: ODE steps; None = `sampling.eval.steps`.
        statistics: more numbers per evaluation, for example
            `reward_models.digit_judge.DigitStatistics`.
        saved_per_prompt: pictures of each prompt in the npz file.
        shown_prompts: number of first prompts whose pictures go to the loggers, with the best and
            worst samples; 0 = no pictures. `report/page/logged.py` draws them.
        shown_samples: pictures of each shown prompt, of the best samples and of the worst.
        kl_samples: samples of each prompt (at most all) from which `kl`, the divergence from the
            base model, is measured. They are trajectories with noise and take two forwards a step
            (`rollout/divergence.py`). 0 = `kl` is not measured. It is not measured either
            without a base model (all weights are trained and `model.keep_reference` is false).
        batch: samples that are drawn together, of one or more prompts; None = those of a prompt.

    Raises:
        ValueError: a count out of range.
        PromptFileError: the prompt file is missing or malformed.
    """

    def __init__(
        self,
        prompts: str | Path | Sequence[Mapping[str, object]],
        heldout_prompts: str | Path | None = None,
        samples_per_prompt: int = 50,
        every: int = 10,
        max_prompts: int | None = None,
        seed: int = 1234,
        steps: int | None = None,
        statistics: Sequence[Statistic] = (),
        saved_per_prompt: int = 16,
        shown_prompts: int = 8,
        shown_samples: int = 4,
        kl_samples: int = 1,
        batch: int | None = None,
    ) -> None:
        for name, value, low in (
            ("samples_per_prompt", samples_per_prompt, 1),
            ("every", every, 0),
            ("max_prompts", 1 if max_prompts is None else max_prompts, 1),
            ("saved_per_prompt", saved_per_prompt, 1),
            ("shown_prompts", shown_prompts, 0),
            ("shown_samples", shown_samples, 1),
            ("kl_samples", kl_samples, 0),
        ):
            if value < low:
                raise ValueError(f"callbacks.evaluation.{name} must be >= {low}, got {value}")
        loaded = load_prompts(prompts if heldout_prompts is None else heldout_prompts)
        kl_samples = min(kl_samples, samples_per_prompt)
        self.drawn = FixedSamples(
            tuple(loaded[:max_prompts]), samples_per_prompt, seed, steps, kl_samples, batch
        )
        """Samples that every evaluation draws."""
        self.every, self.statistics = every, tuple(statistics)
        self.saved_per_prompt = saved_per_prompt
        self.shown_prompts, self.shown_samples = shown_prompts, shown_samples
        self._first: Looks | None = None
        """What alarms compare of this process's first evaluation."""
        self._open: int | None = None
        """RL step whose weights rollouts are evaluating, or None."""
        self._begun = 0
        """RL step whose evaluation was the last to begin, or from which the run began."""
        self._begun_at = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begun = began = trainer.current_epoch
        if began == 0 or (
            self._is_due(began)
            and trainer.strategy.reduce_boolean_decision(_lacks_evaluation(trainer, began), False)
        ):
            self._begin_evaluation(trainer, pl_module, began)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        finished = trainer.current_epoch + 1
        last = finished == trainer.max_epochs
        if last or self._is_due(finished):
            self._begin_evaluation(trainer, pl_module, finished)
        if last or trainer.should_stop:  # no update follows; a checkpoint does
            self._finish_evaluation(trainer)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: object
    ) -> None:
        self._finish_evaluation(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish_evaluation(trainer)  # a stop that was asked for after the step had ended
        # A stop by a signal leaves no time for it.
        if self._begun < trainer.current_epoch and not _stop_was_asked_for(trainer):
            self._begin_evaluation(trainer, pl_module, trainer.current_epoch)
            self._finish_evaluation(trainer)

    def _is_due(self, rl_step: int) -> bool:
        return self.every > 0 and rl_step % self.every == 0

    def _begin_evaluation(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, rl_step: int
    ) -> None:
        """Let rollouts evaluate the present weights, or evaluate them here."""
        self._begun, self._begun_at = rl_step, time.monotonic()
        evaluations: Any = getattr(getattr(trainer.strategy, "parts", None), "evaluations", None)
        if evaluations is not None and evaluations.on_rollouts:
            evaluations.open_evaluation(rl_step)
            self._open = rl_step
        else:
            self._assemble_evaluation(trainer, rl_step, None)

    def _finish_evaluation(self, trainer: pl.Trainer) -> None:
        """Wait for the evaluation in progress, if there is one. All trainers still hold the weights
        that it evaluates."""
        if self._open is not None:
            rl_step, self._open = self._open, None
            assemble = partial(self._assemble_evaluation, trainer, rl_step)
            trainer.strategy.parts.evaluations.finish_evaluation(assemble)  # type: ignore[attr-defined]

    def _assemble_evaluation(
        self, trainer: pl.Trainer, rl_step: int, pieces: Mapping[int, Pictures] | None
    ) -> None:
        """Write the evaluation of `pieces` on trainer 0. None: trainers make the pieces first."""
        engine = _engine_of(trainer)
        with _mark_timeline(trainer, "span", "eval", step=rl_step):
            own = self._sample_together(trainer, rl_step) if pieces is None else None
            if not trainer.is_global_zero:
                return
            pictures = own or join_pictures([piece for _, piece in sorted((pieces or {}).items())])
            numbers = self.measure_pictures(engine, pictures)
        self._report_evaluation(trainer, rl_step, pictures, numbers)

    def _sample_together(self, trainer: pl.Trainer, rl_step: int) -> Pictures:
        """Sample all prompts with all trainers together, and return the pictures on trainer 0."""
        parts: Any = getattr(trainer.strategy, "parts", None)
        begin = (lambda: None) if parts is None else parts.stop_vote.begin_piece
        with getattr(
            trainer.lightning_module, "averaged", nullcontext
        )():  # the moving average, where there is one
            share = trainer.global_rank, trainer.world_size
            local = self.sample_share(_engine_of(trainer), *share, begin, noise=rl_step == 0)
        begin()
        return self._gather_pictures(trainer, local)

    def _report_evaluation(
        self,
        trainer: pl.Trainer,
        rl_step: int,
        pictures: Pictures,
        numbers: Mapping[str, float],
    ) -> None:
        """Write and log an evaluation."""
        run_dir, weights = Path(trainer.default_root_dir), _engine_of(trainer).reward_weights
        samples = run_dir / SAMPLES / f"eval-{rl_step}.npz"
        try:
            save_pictures(samples, pictures, self.saved_per_prompt)
        except OSError as error:
            count_unwritten(samples, len(pictures.prompts), error)
        append_jsonl(
            run_dir / METRICS, {"kind": "eval", "rl_step": rl_step, "time": unix_time(), **numbers}
        )
        taken = {"rl_step": rl_step, "seconds": time.monotonic() - self._begun_at}
        append_event(run_dir, EVALUATED, taken)
        if (told := destroyed_warning(numbers.get("noisy_detail"))) is not None:
            _LOG.warning(told)
        self._raise_alarms(run_dir, rl_step, pictures, weights)
        show = self._pictures_to_show(pictures, weights)
        for logger in trainer.loggers:
            logger.log_metrics(
                {f"eval/{name}": value for name, value in numbers.items()}, step=trainer.global_step
            )
            if show is not None:
                log_pictures = getattr(logger, "log_pictures", partial(_show_at_once, logger))
                log_pictures(show, trainer.global_step)

    def _pictures_to_show(
        self, pictures: Pictures, weights: Mapping[str, float]
    ) -> Callable[[Logger, int], None] | None:
        """Return what gives the pictures to a logger; None where nothing shows them."""
        if not self.shown_prompts:
            return None
        texts = [prompt.text for prompt in pictures.prompts]
        scores = {name: values.numpy() for name, values in pictures.rewards.items()}
        counts, sources = (self.shown_prompts, self.shown_samples), fitted_sources(pictures)
        shown = pictures.media.numpy(), texts, scores, weights, *counts, sources
        return picture_logger(*shown, track_of(pictures))

    def _raise_alarms(
        self, run_dir: Path, rl_step: int, pictures: Pictures, weights: Mapping[str, float]
    ) -> None:
        """Compare with this process's first evaluation, and write suspicious changes to
        events.jsonl."""
        looks = looks_of(pictures.media)
        if self._first is not None:
            scored = [name for name in weights if name in pictures.rewards]
            for alarm in of_pictures(self._first, looks, pictures, scored):
                append_event(run_dir, "alarm", {"rl_step": rl_step, **asdict(alarm)})
        self._first = self._first or looks

    def sample_share(
        self,
        engine: RolloutEngine,
        rank: int = 0,
        ranks: int = 1,
        before_step: Callable[[], None] = lambda: None,
        noise: bool = False,
    ) -> Pictures:
        """Sample rank `rank`'s share of the prompts. `before_step` and `noise` are as in
        `FixedSamples.draw_pieces`."""
        pieces = len(self.drawn.pieces)
        share = -(-pieces // ranks)
        # A rank without a piece of its own repeats one: sharded weights need the same forwards
        # everywhere.
        mine = [(rank * share + i) % pieces for i in range(share)]
        return self.drawn.draw_pieces(engine, mine, before_step, noise)

    def measure_pictures(self, engine: RolloutEngine, pictures: Pictures) -> dict[str, float]:
        """Return the numbers of an eval line; see `eval_numbers`."""
        return eval_numbers(pictures, engine.reward_weights, self.statistics)

    def _gather_pictures(self, trainer: pl.Trainer, local: Pictures) -> Pictures:
        """Return the pictures of all ranks on trainer 0, and its own on each other. Repeated
        pictures come last and are cut off."""
        drawn = self.drawn
        rows = len(drawn.prompts) * drawn.per_prompt
        return Pictures(
            media=_gather_rows(trainer, local.media)[:rows],
            prompts=tuple(prompt for prompt in drawn.prompts for _ in range(drawn.per_prompt)),
            rewards={
                name: _gather_rows(trainer, scores)[:rows] for name, scores in local.rewards.items()
            },
            kl=_gather_rows(trainer, local.kl)[:rows],
            noisy=_gather_rows(trainer, local.noisy)[:rows],
            sound=None
            if local.sound is None
            else replace(local.sound, waveform=_gather_rows(trainer, local.sound.waveform)[:rows]),
        )


def _show_at_once(logger: Logger, show: Callable[[Logger, int], None], step: int) -> None:
    """Stand in for the `log_pictures` of a logger that has none."""
    show(logger, step)


def _engine_of(trainer: pl.Trainer) -> RolloutEngine:
    engine = getattr(trainer.strategy, "engine", None)
    if not isinstance(engine, RolloutEngine):
        raise TypeError(
            f"{type(trainer.strategy).__name__} has no rollout engine to evaluate with: use "
            "DisaggregatedStrategy"
        )
    return engine


def _lacks_evaluation(trainer: pl.Trainer, rl_step: int) -> bool:
    """Return whether the run was resumed before the evaluation of `rl_step` was written, as trainer
    0 sees it."""
    path = Path(trainer.default_root_dir) / METRICS
    if not trainer.is_global_zero or not path.exists():
        return trainer.is_global_zero
    rows = JsonlTail(path).read_new_rows()
    return not any(row.get("kind") == "eval" and row.get("rl_step") == rl_step for row in rows)


def _gather_rows(trainer: pl.Trainer, local: Tensor) -> Tensor:
    """Gather [n, ...] of each rank to [ranks * n, ...] on the CPU, in rank order, for trainer 0;
    the others keep their own. A collective of the trainers, in parts, because the GPUs have little
    room beside what they train."""
    if trainer.world_size == 1:
        return local
    strategy, parts = trainer.strategy, list[Tensor]()
    with _mark_timeline(trainer, "stage", "wait straggler"):
        for part in local.split(max(1, GATHERED_BYTES // max(1, local[0].nbytes))):
            everywhere = strategy.all_gather(part.to(strategy.root_device))
            if trainer.is_global_zero:
                parts.append(everywhere.cpu())
    return torch.cat(parts, dim=1).flatten(0, 1) if parts else local


def _mark_timeline(
    trainer: pl.Trainer, kind: str, name: str, **facts: object
) -> AbstractContextManager[object]:
    """Mark the body in the run's timeline, if the strategy keeps one."""
    spans = getattr(trainer.strategy, "spans", None)
    return nullcontext() if spans is None else getattr(spans, kind)(name, **facts)


def _stop_was_asked_for(trainer: pl.Trainer) -> bool:
    """Return whether a signal, or the run itself, asked for the stop, as any trainer sees it."""
    control = getattr(trainer.strategy, "control", None)
    return control is not None and trainer.strategy.reduce_boolean_decision(control.stopping, False)
