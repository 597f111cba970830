"""Rules of single algorithms and models.

They know a class by the end of its `_target_`, because nothing is imported before a configuration
is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from digenrl.config.relations.people import people_rewards
from digenrl.config.relations.view import Rule, View
from digenrl.facts import file_beside, of_target
from digenrl.images import PREFERENCE, SAMPLES
from digenrl.prompts import PromptFileError, read_prompt_file, weighted_files

_PREFERENCES = ".OfflineDPO"
"""Ends the `_target_` of the algorithm that trains pairs of files."""
_OF_FILES = (".Supervised", _PREFERENCES)
"""End the `_target_` of algorithms that train nothing but files."""
_WHOLE_GROUPS = (".DGPO",)
"""End the `_target_` of algorithms that compare all samples of a group in one forward."""
_LAST_WEIGHTS = "checkpoints/last/policy.safetensors"


def _half_precision(get: View) -> Iterator[str]:
    # FLUX.1 at full size, with a loss that is a mean over 65,536 values: 98 % of the gradient at
    # the network's output is exactly 0 in float16, and nothing in bfloat16.
    if (dtype := get("model.dtype")) == "float16":
        yield (
            f"model.dtype = {dtype}: gradients are smaller than its smallest number and become 0, "
            "so that nothing is learned (no loss scaling exists); set model.dtype=bfloat16, or "
            "float32 on GPUs without bfloat16 (V100, T4, RTX 20)."
        )


def _quantized_base(get: View) -> Iterator[str]:
    if (kind := get("model.quantize")) is None:
        return
    if get("model.lora") is None:
        yield (
            f"model.quantize = {kind} with model.lora = null: only frozen weights can be "
            "quantized; train an adapter (model.lora), or set model.quantize=null."
        )
    # `auto` is refused too: it may settle on shards.
    if (sharding := get("parallel.sharding")) != "ddp" and get("allocation.trainers") != 1:
        yield (
            f"model.quantize = {kind} with parallel.sharding = {sharding}: quantized weights are "
            "not divided among trainers; set parallel.sharding=ddp."
        )


def _start_reference(get: View) -> Iterator[str]:
    if get("algorithm.reference") != "start":
        return
    if get("model.lora") is None or get("model.lora.path") is None:
        yield (
            "algorithm.reference = start with model.lora.path = null: nothing is loaded, and a new "
            "adapter is the base itself; set algorithm.reference=base, or name an adapter."
        )


def _noises_finished_samples(get: View) -> bool:
    """Return whether training noises finished samples, and never sees how they were drawn."""
    return str(get("algorithm.train_steps._target_")).endswith(".NoiseLevels")


def _sampling_adapter(get: View) -> Iterator[str]:
    if (path := get("sampling.lora")) is None:
        return
    if not _noises_finished_samples(get):
        yield (
            f"sampling.lora = {path} with algorithm._target_ = {get('algorithm._target_')}: its "
            "loss compares the transitions that the sampler made with those of the network that is "
            "trained, and with an adapter on one side alone the first ratios would not be 1; use a "
            "method that noises finished samples (algorithm=nft, awm, dgpo, rvm or dpo), or merge "
            "the adapter into the base (docs/running.md)."
        )


def _evaluation_solver(get: View) -> Iterator[str]:
    solver, facts = get("sampling.eval.solver"), of_target(str(get("model._target_")))
    if solver != "euler" and facts is not None and facts.own_levels:
        yield (
            f"sampling.eval.solver = {solver}: would count the {facts.own_levels} of "
            f"{facts.family} on the noise levels of its video; set sampling.eval.solver=euler."
        )


def _sample_files(get: View) -> Iterator[str]:
    target = str(get("algorithm._target_"))
    offline = target.endswith(_PREFERENCES)
    if get("data.samples") == "generated":
        if target.endswith(_OF_FILES):
            yield (
                f"algorithm._target_ = {target} with data.samples = generated: it trains on files, "
                "and the model's own samples would teach it nothing; set data.samples=files."
            )
        return
    if not _noises_finished_samples(get):
        levels = get("algorithm.train_steps._target_")
        yield (
            f"algorithm.train_steps = {levels} with data.samples = files: a file has no denoising "
            "steps to train; use algorithm=sft, offline_dpo, nft or dpo."
        )
    if (candidates := get("sampling.scouts.candidates")) > 1:
        yield (
            f"data.samples = files with sampling.scouts.candidates = {candidates}: nothing is "
            "generated; set sampling.scouts.candidates=1."
        )
    if offline and isinstance(size := get("sampling.task_size"), int) and size % 2:
        yield (
            f"sampling.task_size = {size} with {target}: a task holds pairs of a preferred and a "
            f"rejected file; use an even number, such as {size + 1}."
        )
    wanted = PREFERENCE if offline else ("media",)
    for name, _ in weighted_files(get("data.prompts")):
        try:
            file = read_prompt_file(name)
        except PromptFileError:  # said by the check of the files
            return
        for line, prompt in zip(file.lines, file.prompts, strict=True):
            named = {image.role for image in prompt.images if image.role in SAMPLES}
            if named != set(wanted):
                found = ", ".join(sorted(named)) or "no file"
                yield (
                    f"algorithm._target_ = {target} with data.samples = files needs "
                    f"{' and '.join(wanted)} in every line, and {file.path}:{line} names {found}; "
                    "change the line, or the algorithm."
                )
                return


def needs_whole_groups(target: str, reward: object) -> bool:
    """Return whether a task holds a group: because the algorithm `target` compares all samples of a
    group in one forward, or because people compare them (the group `reward`)."""
    return target.endswith(_WHOLE_GROUPS) or bool(people_rewards(reward))


def _whole_groups(get: View) -> Iterator[str]:
    target = str(get("algorithm._target_"))
    size, group = get("sampling.task_size"), get("data.group_size")
    if not target.endswith(_WHOLE_GROUPS) or size == "auto":
        return
    if size != group:
        yield (
            f"sampling.task_size = {size} with {target}: it compares the data.group_size = {group} "
            "samples of a group at equal noise, so they must meet in one task; set "
            f"sampling.task_size={group}."
        )
    if get("data.updates_split") == "samples" and get("algorithm.updates_per_batch") > 1:
        yield (
            f"data.updates_split = samples with {target}: each update would train a part of every "
            "group, and it compares whole groups; set data.updates_split=groups."
        )


def teacher_weights(run: str, target: str) -> Path:
    """Return the file of a teacher's weights. `run` is a run directory (its last checkpoint), a
    file, or the name of a file beside the module of the algorithm `target`."""
    path = Path(run)
    if path.name == run and not path.exists():
        path = file_beside(target, run)
    return path / _LAST_WEIGHTS if path.is_dir() else path


def _teacher_runs(get: View) -> Iterator[str]:
    target = str(get("algorithm._target_"))
    if not get("algorithm.teachers"):
        yield (
            "algorithm.teachers = {}: nobody teaches; name one, as "
            "algorithm.teachers.NAME={run: RUN}."
        )
        return
    for name, teacher in get("algorithm.teachers").items():
        key = f"algorithm.teachers.{name}"
        run, weight = teacher.get("run"), teacher.get("weight", 1.0)
        looked = "" if run is None else f" (looked for {teacher_weights(run, target)})"
        if run is None or not teacher_weights(run, target).is_file():
            yield (
                f"{key}.run = {run}: no such weights{looked}; name a finished run of the same "
                "model, or its policy.safetensors."
            )
        # `not >` refuses NaN too.
        if not weight > 0:
            yield f"{key}.weight = {weight}: must be above 0; leave the teacher out instead."
    if _noises_finished_samples(get):
        levels = get("algorithm.train_steps._target_")
        yield (
            f"algorithm.train_steps = {levels} with {target}: it compares transitions, and an ODE "
            "keeps none; use algorithm/train_steps=all_but_last."
        )
    yield from _untaught_prompts(get("data.prompts"), get("algorithm.teachers"))


def _untaught_prompts(
    asked: str | Sequence[Mapping[str, object]], teachers: Mapping[str, Mapping[str, object]]
) -> Iterator[str]:
    """Yield the first training prompt that no teacher knows."""
    # null teaches every prompt.
    if any(teacher.get("prompts") is None for teacher in teachers.values()):
        return
    try:
        taught = {
            prompt.uid
            for each in teachers.values()
            for prompt in read_prompt_file(str(each["prompts"])).prompts
        }
        files = [read_prompt_file(name) for name, _ in weighted_files(asked)]
    except PromptFileError as error:
        yield f"algorithm.teachers: {error}"
        return
    for file in files:
        for line, prompt in zip(file.lines, file.prompts, strict=True):
            if prompt.uid not in taught:
                yield (
                    f"algorithm.teachers: none has the prompt of {file.path}:{line}; add it to the "
                    "`prompts` of one, or set a teacher's prompts=null (all)."
                )
                return


RULES: tuple[Rule, ...] = (
    _half_precision,
    _quantized_base,
    _start_reference,
    _sampling_adapter,
    _evaluation_solver,
    _sample_files,
    _teacher_runs,
    _whole_groups,
)
