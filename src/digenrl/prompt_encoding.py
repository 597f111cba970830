"""Fill the prompt store with what a run asks for, before its first task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from digenrl import accelerator
from digenrl.callbacks.evaluation import Evaluation
from digenrl.config.settings import Settings
from digenrl.data import PromptData
from digenrl.models import pretrained
from digenrl.models.pipeline import DiffusersPolicy
from digenrl.models.pipeline_codec import DiffusersCodec
from digenrl.models.policy import Policy
from digenrl.models.pretrained import cache_root
from digenrl.models.prompt_store import PromptStore, files_digest
from digenrl.parts import BuildContext
from digenrl.record.run_dir import PROMPT_STORE, append_event, free_space
from digenrl.types import Prompt


def encode_run_prompts(
    context: BuildContext, policy: Policy, data: PromptData, callbacks: Sequence[pl.Callback]
) -> None:
    """Fill the prompt store while the network is not on the device yet; the run goes on over one
    that fails."""
    if context.settings.data.prompt_store is None:
        return
    session, rank = context.session, context.world.rank
    with session.progress.stage("encode"):
        try:
            filled = fill_prompt_store(
                context.settings, policy, data, callbacks, session.progress.mark_progress
            )
        except OSError as error:
            logging.getLogger(__name__).warning(
                f"{error} What it lacks is encoded by every rank that needs it."
            )
            return
    if filled is not None and (filled.encoded or rank == 0):
        append_event(session.run_dir, PROMPT_STORE, {"rank": rank, **asdict(filled)})


@dataclass(frozen=True)
class Filled:
    """A prompt store that has what a run needs."""

    root: str
    texts: int
    """Number of prompts and negative prompts of the steps and of the evaluation."""
    encoded: int
    """Number of texts that this process encoded."""


def fill_prompt_store(
    settings: Settings,
    policy: Policy,
    data: PromptData,
    callbacks: Sequence[pl.Callback] = (),
    progress: Callable[[], None] = lambda: None,
) -> Filled | None:
    """Have every prompt of the run, and of the evaluation among `callbacks`, in the store of
    `data.prompt_store`, from which `policy` then reads. None: there is no store, or no encoder
    worth one.

    Args:
        progress: as in `PromptStore.add_wordings`.

    Raises:
        OSError: the store cannot be written; the policy reads what it has.
    """
    setting = settings.data.prompt_store
    if setting is None or not isinstance(policy, DiffusersPolicy):
        return None
    root = cache_root("prompts") if setting == "auto" else Path(setting)
    steps = range(settings.max_rl_steps)
    all_of_them = len(steps) * settings.data.prompts_per_batch >= len(data.prompts)
    wanted = (
        list(data.prompts)
        if all_of_them
        else [prompt for step in steps for prompt in data.sampler.prompts_at(step)]
    )
    evaluated = [callback.drawn for callback in callbacks if isinstance(callback, Evaluation)]
    wanted += [prompt for drawn in evaluated for prompt in drawn.prompts]
    try:
        with policy.guided_by(
            max(policy.guidance_scale, settings.sampling.eval.guidance_scale or 0.0)
        ):
            found = store_conditioning(
                policy.codec, root, wanted, accelerator.current_device(), progress
            )
    except OSError as error:
        raise OSError(
            f"data.prompt_store = {root}: cannot be used ({error.strerror or error}, "
            f"{free_space(root)}): make "
            "room, name another directory (data.prompt_store; auto: DIGENRL_CACHE), or set "
            "data.prompt_store=null."
        ) from error
    return Filled(str(root), *found)


def store_conditioning(
    codec: DiffusersCodec,
    root: Path,
    prompts: Iterable[Prompt],
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
) -> tuple[int, int]:
    """Put the conditioning of all `prompts` into the store under `root`. The codec's
    `encode` then reads from the store, also if not all of it could be written.

    Encoders with other weights, dtype, length, libraries or kind of device have another store. They
    are moved to `device` at most once, and then leave memory. `progress` is called as in
    `PromptStore.add_wordings`.

    Returns:
        (wordings, wordings that this process has encoded).

    Raises:
        ValueError: as `Codec.encode`.
        OSError: the store cannot be written.
    """
    files = pretrained.component_files(codec.path, *codec.encoders)
    facts: dict[str, Any] = {}
    if codec.reads:
        files += pretrained.component_files(
            codec.path, "vae", "image_encoder*", "image_processor*", "processor*"
        )
        facts = {
            "size": [codec.height, codec.width, codec.frames],
            "vae_dtype": str(codec.vae_dtype),
        }
    facts |= {
        "family": codec.family,
        "encoders": files_digest(files, root / "digests"),
        "dtype": str(codec.dtype),
        "length": codec.max_sequence_length,
        "device": device.type,
        "libraries": {
            name: version(name) for name in ("diffusers", "transformers", "tokenizers", "torch")
        },
    }
    codec.store = store = PromptStore(root, facts)
    positive, negative = codec.branch_wordings(prompts)
    wordings = dict.fromkeys(positive + negative)
    try:
        encoded = store.add_wordings(wordings, partial(codec.encode_each, device=device), progress)
    finally:
        codec.release_encoders()
    return len(wordings), encoded
