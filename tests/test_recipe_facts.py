"""The second half of the contract: what the sources say, read by a script, beside what a recipe does.

docs/recipe_facts.json has the literals of the cited lines and the digest of these lines
(`python -m scripts.recipe_facts`). Here the recipe's loaded configuration is compared with these
literals. Computed results are compared too, with the published rules restated in numpy: advantages
of drawn rewards, the windows of 300 RL steps, the samples of every update, the moving average after
50 updates, the coefficients of the SDE, the losses of Guard and Flow-DPPO, the decay of NFT's old
policy. Every check is shown to fail on an altered configuration.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from digenrl.algorithms.surrogates import Cells
from digenrl.schedule.spec import ScheduleSpec
from scripts import recipe_facts
from tests.test_configs import published
from tests.test_recipe_contract import EVIDENCE, rows, same, value

pytestmark = pytest.mark.heavy

FACTS: dict[str, dict[str, Any]] = json.loads(recipe_facts.FACTS.read_text(encoding="utf-8"))
READ = {
    *("data.prompts", "reward.rewards", "model.lora", "model.lora.targets", "model.path"),
    *("model.dtype", "sampling.eval.guidance_scale", "sampling.eval.solver", "sampling.same_noise"),
    *("algorithm.train_steps.last", "algorithm.kl_kind"),
    *("algorithm.kl_weight", "algorithm.step_weight", "algorithm.detach_uncond", "algorithm.ema"),
    *("data.zero_variance_groups", "reward.rewards.ocr.scorer.best_line"),
    *("model.grid", "sampling.storage_dtype", "algorithm.train_guidance"),
    "algorithm.train_steps.stratified",
}
"""Keys whose published value is no literal of the cited lines: a person has read it there, and the
digest says when to read again."""
COMPUTED = {
    *("algorithm.sde._target_", "algorithm.train_steps._target_", "algorithm.train_steps.overlap"),
    *("algorithm.advantage.std", "algorithm.advantage.unbiased", "algorithm.advantage.combine"),
    *("algorithm.advantage.best_and_worst", "algorithm.updates_per_batch", "data.updates_split"),
    *("data.prompts_per_batch", "algorithm.ema.times", "sampling.guidance_scale"),
    *("algorithm.train_steps.size", "algorithm.train_steps.stop"),
    *("algorithm.train_steps.untrained", "algorithm.surrogate._target_"),
}
"""Keys whose published value is computed from literals, by the checks below."""


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def numbers(experiment: str, key: str) -> list[float]:
    """Numeric literals of the lines that the row cites."""
    found = (number(text) for text in FACTS[f"{experiment} {key}"]["literals"])
    return [each for each in found if each is not None]


def stands(wanted: Any, literals: list[str]) -> bool:
    """Whether a value is among the literals: equal as a number or a word, or a switch."""
    if wanted is True and any(text.startswith("--") for text in literals):
        return True
    plain = number(str(wanted))
    words = {text.lower() for text in literals}
    return (
        str(wanted).lower() in words
        or (wanted is None and "none" in words)
        or (plain is not None and any(number(text) == plain for text in literals))
    )


def test_every_row_with_line_numbers_has_a_fact_of_these_lines() -> None:
    """Only repositories that the script has read count. Other rows name a function or an unread
    commit."""
    read = {fact["source"].split("@")[0] for fact in FACTS.values()}
    for row in rows():
        if row["key"] == EVIDENCE or recipe_facts.lines_of(row["line"]) is None:
            continue
        fact = FACTS.get(f"{row['experiment']} {row['key']}")
        if row["repository"] in read:
            source = f"{row['repository']}@{row['commit']}:{row['file']}:{row['line']}"
            assert fact is not None, row
            assert fact["source"] == source
    assert len(FACTS) >= 250


def test_no_published_number_is_typed_by_hand() -> None:
    """A published value stands in the cited lines, is computed below, or is one that is read."""
    typed = [
        f"{name}: {published!r} is not among {fact['literals']}"
        for row in rows()
        if (fact := FACTS.get(name := f"{row['experiment']} {row['key']}"))
        if not row["key"].startswith("(") and row["key"] not in READ | COMPUTED
        if (published := value(row["published"])) is not None  # absent there: read by a person
        if not stands(published, fact["literals"])
    ]
    assert not typed


def test_the_script_reads_values_lines_and_digest_from_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("a\n  --lr 1e-5 \\\n  --use_group \\\nconfig.std = True # 7\n")
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "a")):
        subprocess.run([*git, *words], check=True)
    row = {"repository": "a/b", "commit": "HEAD", "file": "run.sh", "line": "2-3,4"}
    fact = recipe_facts.fact(tmp_path, row)
    assert fact is not None
    assert fact["literals"] == ["1e-5", "--use_group", "True"]
    assert fact["source"] == "a/b@HEAD:run.sh:2-3,4"
    assert recipe_facts.fact(tmp_path, row | {"line": "main"}) is None
    other = recipe_facts.fact(tmp_path, row | {"line": "2-3"})
    assert other is not None
    assert other["sha256"] != fact["sha256"]


# --- the published rules ---


def group_rule(rewards: dict[str, np.ndarray], eps: float, clip: float) -> np.ndarray:
    """DanceGRPO: each group by its own mean and unbiased deviation."""
    total = sum(rewards.values())
    spread = total.std(axis=1, ddof=1, keepdims=True)
    return np.clip((total - total.mean(axis=1, keepdims=True)) / (spread + eps), -clip, clip)


def mixed_rule(rewards: dict[str, np.ndarray], eps: float, clip: float) -> np.ndarray:
    """MixGRPO: each reward by itself, then the sum with weights that sum to 1."""
    parts = [group_rule({"": reward}, eps, np.inf) for reward in rewards.values()]
    return np.clip(sum(parts) / len(parts), -clip, clip)


def best_and_worst_rule(rewards: dict[str, np.ndarray], eps: float, clip: float) -> np.ndarray:
    """DanceGRPO's HunyuanVideo: of each group the best and the worst, and the mean over these."""
    kept = int(numbers("hunyuanvideo_dancegrpo", "algorithm.advantage.best_and_worst")[0])
    whole = group_rule(rewards, eps, clip)
    rank = sum(rewards.values()).argsort(axis=1).argsort(axis=1)
    size = whole.shape[1]
    chosen = (rank < kept // 2) | (rank >= size - kept // 2)
    return whole * chosen * size / kept


def batch_rule(rewards: dict[str, np.ndarray], eps: float, clip: float) -> np.ndarray:
    """Flow-GRPO, `global_std`: the group's mean, the deviation of all rewards."""
    total = sum(rewards.values())
    return np.clip((total - total.mean(axis=1, keepdims=True)) / (total.std() + eps), -clip, clip)


def unbiased_batch_rule(rewards: dict[str, np.ndarray], eps: float, clip: float) -> np.ndarray:
    """UniRL, `adv_use_global_std`: as above with the unbiased deviation."""
    total = sum(rewards.values())
    spread = total.std(ddof=1) + eps
    return np.clip((total - total.mean(axis=1, keepdims=True)) / spread, -clip, clip)


def population_rule(rewards: dict[str, np.ndarray], eps: float, clip: float) -> np.ndarray:
    """GenRL without `global_std`."""
    total = sum(rewards.values())
    centred = total - total.mean(axis=1, keepdims=True)
    return np.clip(centred / (total.std(axis=1, keepdims=True) + eps), -clip, clip)


def flow_std(sigmas: np.ndarray, level: float) -> np.ndarray:
    """Flow-GRPO: a sqrt(s / (1 - s)), with the second sigma at s = 1."""
    guard = np.where(sigmas[:-1] == 1, sigmas[1], sigmas[:-1])
    return level * np.sqrt(sigmas[:-1] / (1 - guard))


def dance_std(sigmas: np.ndarray, level: float) -> np.ndarray:
    return np.full(len(sigmas) - 1, level)


def mixgrpo_starts(steps: int) -> list[int]:
    """First step of MixGRPO's window at each of 300 iterations."""
    stride, size, hold = 1, 4, 25  # `prog_overlap_step`, `group_size`, `iters_per_group`
    assert numbers("flux1_mixgrpo", "algorithm.train_steps.size") == [size]
    assert numbers("flux1_mixgrpo", "algorithm.train_steps.hold") == [hold]
    start, inside, found = 0, 0, []
    for _ in range(300):
        found.append(start)
        inside += 1
        if inside == hold:
            start, inside = start + stride, 0
        if start > steps - 2:
            start = 0
    return found


def average_after(updates: int, decay: float, every: int, micro: int, walk: np.ndarray) -> float:
    """Flow-GRPO's moving average, called after every micro-batch with the count of updates."""
    average = walk[0]
    for batch in range(1, updates * micro + micro):
        done = batch // micro
        if done <= updates and (done + 1) % every == 0:
            average += (1 - min((1 + done) / (10 + done), decay)) * (walk[done] - average)
    return float(average)


def guard_loss(cells: dict[str, np.ndarray], bound: float) -> np.ndarray:
    """GRPO-Guard, train_sd3_GRPO_Guard.py: RatioNorm and the weight 1 / h of a step."""
    scale = cells["sqrt_h"] * cells["std"]
    bias = ((cells["mean"] - cells["old_mean"]) ** 2).mean(-1) / (2 * scale**2)
    ratio = np.exp((cells["log_prob"] - cells["old_log_prob"] + bias) * scale)
    clipped = np.clip(ratio, 1 - bound, 1 + bound)
    return np.maximum(-cells["A"] * ratio, -cells["A"] * clipped) / cells["sqrt_h"] ** 2


def dppo_loss(cells: dict[str, np.ndarray], bound: float) -> np.ndarray:
    """Flow-DPPO, flowdppo.py: dropped where the KL is high and the ratio goes with the advantage."""
    ratio = np.exp(cells["log_prob"] - cells["old_log_prob"])
    scale = cells["sqrt_h"] * cells["std"]
    far = ((cells["mean"] - cells["old_mean"]) ** 2).mean(-1) / (2 * scale**2) >= bound
    drop = far & (((ratio > 1) & (cells["A"] > 0)) | ((ratio < 1) & (cells["A"] < 0)))
    return np.where(drop, 0.0, -cells["A"] * ratio)


ADVANTAGES: dict[str, Callable[..., np.ndarray]] = {
    "flux1_dancegrpo": group_rule,
    "wan21_dancegrpo": group_rule,
    "flux1_mixgrpo": mixed_rule,
    "hunyuanvideo_dancegrpo": best_and_worst_rule,
    "wan21_videoalign": best_and_worst_rule,
    "sd35_flowgrpo": batch_rule,
    "wan21_flowgrpo": population_rule,
    "sd35_pickscore": batch_rule,
    "sd35_geneval": batch_rule,
    **{f"sd35_nft{task}": batch_rule for task in ("", "_ocr", "_geneval", "_hpsv2")},
    "sd35_awm": batch_rule,
    "sd35_dgpo": population_rule,
    "sd35_cps": batch_rule,
    "sd35_guard": population_rule,
    "sd35_dppo": unbiased_batch_rule,
    "flux1_flowgrpo": batch_rule,
    "flux1_cps": population_rule,
    "flux1_guard": population_rule,
    "flux1_dppo": unbiased_batch_rule,
    "qwen_image_flowgrpo": batch_rule,
}
FORWARD = {name for name in ADVANTAGES if any(m in name for m in ("_nft", "_awm", "_dgpo"))}
"""Recipes of the forward process: no transition has noise."""
KERNELS = {
    name: dance_std if name.endswith(("dancegrpo", "videoalign")) else flow_std
    for name in ADVANTAGES
    if name not in FORWARD
}
SURROGATES = {
    **{f"{model}_guard": (guard_loss, "algorithm.clip_range") for model in ("sd35", "flux1")},
    **{
        f"{model}_dppo": (dppo_loss, "algorithm.surrogate.threshold") for model in ("sd35", "flux1")
    },
}
WHOLE_GROUPS = ("sd35_cps", "sd35_dppo", "flux1_cps", "qwen_image_flowgrpo")
"""Recipes whose source does not shuffle: an update takes whole groups. Each trains a few steps."""
UPDATE_SIZE = {  # samples of one group that an update takes, where it takes some of every group
    "flux1_dancegrpo": lambda: numbers("flux1_dancegrpo", "algorithm.updates_per_batch")[0],
    "flux1_mixgrpo": lambda: numbers("flux1_mixgrpo", "algorithm.updates_per_batch")[0],
    "wan21_dancegrpo": lambda: numbers("wan21_dancegrpo", "algorithm.updates_per_batch")[0] / 2,
    **{
        name: lambda: numbers("sd35_flowgrpo", "data.group_size")[0] / 2
        for name in (
            "sd35_flowgrpo",
            "sd35_pickscore",
            "sd35_geneval",
            "sd35_guard",
            "sd35_nft_ocr",
        )
    },
    **{
        f"flux1_{name}": lambda: numbers("flux1_flowgrpo", "data.group_size")[0] / 2
        for name in ("flowgrpo", "guard", "dppo")
    },
    **{
        name: partial(lambda name: numbers(name, "data.group_size")[0], name)
        for name in WHOLE_GROUPS
    },
    "wan21_flowgrpo": lambda: numbers("wan21_flowgrpo", "data.group_size")[0] / 2,
}


# --- the checks: each yields what is wrong with a configuration ---


def values(experiment: str, config: Any) -> Iterator[str]:
    """Values that are the source's own, beside the literals of its lines."""
    for row in rows():
        fact = FACTS.get(f"{experiment} {row['key']}")
        if row["experiment"] != experiment or row["key"].startswith("(") or fact is None:
            continue
        published = value(row["published"])
        if not same(row) or not stands(published, fact["literals"]):
            continue
        found = OmegaConf.select(config, row["key"])
        if not stands(found, fact["literals"]):
            yield f"{row['key']} = {found}, {fact['source']} has {fact['literals']}"


def advantages(experiment: str, config: Any) -> Iterator[str]:
    if experiment not in ADVANTAGES:
        return
    drawn = np.random.default_rng(7)
    shape = (config.data.prompts_per_batch, config.data.group_size)
    weights = {name: entry.weight for name, entry in config.reward.rewards.items()}
    rewards = {name: drawn.normal(size=shape) for name in weights}
    rewards[next(iter(weights))][0, 0] += 50.0  # cut at `clip`
    rule = instantiate(config.algorithm.advantage)
    ours = rule({name: torch.from_numpy(r) for name, r in rewards.items()}, weights).values.numpy()
    eps = numbers(experiment, "algorithm.advantage.eps")[-1]
    clip = next(iter(numbers(experiment, "algorithm.advantage.clip")), np.inf)
    theirs = ADVANTAGES[experiment](rewards, eps, clip)
    if (apart := np.abs(ours - theirs).max()) > 1e-5:
        yield f"advantages of drawn rewards are {apart:.3g} apart"


def windows(experiment: str, config: Any) -> Iterator[str]:
    steps = config.sampling.steps
    rule = instantiate(config.algorithm.train_steps)
    plans = [rule.plan_steps(config.seed, step, steps).trained for step in range(300)]
    if experiment == "flux1_mixgrpo":
        wrong = [n for n, start in enumerate(mixgrpo_starts(steps)) if plans[n][0] != start]
        if wrong or {len(plan) for plan in plans} != {4}:
            yield f"windows differ from iteration {wrong[:1]} on"
    elif experiment.endswith(("dancegrpo", "videoalign")):
        share = numbers(experiment, "algorithm.train_steps.fraction")[0]
        counts = np.bincount([step for plan in plans for step in plan], minlength=steps)
        if {len(plan) for plan in plans} != {int((steps - 1) * share)}:
            yield f"{len(plans[0])} steps are trained"
        if counts[-1] or counts[:-1].min() < 0.8 * 300 * share:
            yield f"steps are drawn {counts} times"
    elif experiment in WHOLE_GROUPS:
        total, _, share = numbers(experiment, "algorithm.train_steps.stop")
        stop = int(total * share) if share < 1 else int(total // share)
        size = int(numbers(experiment, "algorithm.train_steps.size")[0])
        drawn = [tuple(range(start, start + size)) for start in range(stop - size + 1)]
        if experiment == "sd35_dppo":
            drawn = list(combinations(range(stop), size))
        if set(plans) != set(drawn):
            yield f"steps {sorted(set(plans))} are drawn, in the source {drawn}"
        if rule.plan_steps(config.seed, 0, steps).sde != plans[0]:
            yield "steps that are not trained have noise"
    elif experiment == "sd35_awm":  # `torch.linspace(1, int(14 x 0.9), 7).long()`
        (size,) = numbers(experiment, "algorithm.train_steps.size")
        ends = np.linspace(1, int(steps * 0.9), int(size) + 1).astype(int)
        for part, (low, high) in enumerate(pairwise(ends)):
            if {plan[part] for plan in plans} != set(range(low, high)):
                yield f"part {part} of the levels is not {low}..{high - 1}"
    elif experiment == "sd35_dgpo":  # `random.sample(range(trunc_steps + 1), 4)`
        (size,) = numbers(experiment, "algorithm.train_steps.size")
        if set(plans) != set(combinations(range(4 + 1), int(size))):
            yield f"levels {sorted(set(plans))} are drawn"
    elif "_nft" in experiment:  # declared: all, in place of int(steps x 0.99)
        if {len(plan) for plan in plans} != {steps}:
            yield f"{len(plans[0])} noise levels are trained"
    elif experiment in ADVANTAGES:
        last = {plan == tuple(range(steps - 1)) for plan in plans}
        if last != {True}:
            yield "not every step but the last is trained"


def updates(experiment: str, config: Any) -> Iterator[str]:
    if experiment not in UPDATE_SIZE:
        return
    group, size = config.data.group_size, int(UPDATE_SIZE[experiment]())
    spec = ScheduleSpec(
        prompts=config.data.prompts_per_batch,
        group_size=group,
        task_size=1,
        denoise_steps=config.sampling.steps,
        trained_steps=1,
        updates_per_batch=config.algorithm.updates_per_batch,
        updates_split=config.data.updates_split,
    )
    first = range(0, spec.prompts * spec.slices, spec.prompts)
    ours = [list(spec.parts_of(portion)) for portion in first]
    theirs = [list(range(low, low + size)) for low in range(0, group, size)]
    if ours != theirs or len(theirs) != (
        1 if experiment in WHOLE_GROUPS else config.algorithm.updates_per_batch
    ):
        yield f"updates take {ours} of a group, in the source {theirs}"


def moving_average(experiment: str, config: Any) -> Iterator[str]:
    if OmegaConf.select(config, "algorithm.ema") is None or experiment not in ADVANTAGES:
        return
    times = numbers(experiment, "algorithm.ema.times") if experiment not in FORWARD else [2.0]
    if len(times) > 2:  # batches of a rank, half of them for each update; 32 GPUs
        *gpus, rank, group, prompts = times
        micro = int(prompts / ((gpus or [32])[0] * rank / group)) // 2
    else:
        micro = int(times[0]) // 2
    walk = np.random.default_rng(3).normal(size=51).cumsum()
    ours = instantiate(config.algorithm.ema)
    weight = torch.nn.Parameter(torch.tensor([walk[0]]))
    ours.begin_average({"w": weight})
    for update in range(1, 51):
        weight.data.fill_(walk[update])
        ours.update_average({"w": weight})
    decay, every = (
        next(found for found in numbers(experiment, f"algorithm.ema.{key}") if test(found))
        for key, test in (("decay", lambda x: x < 1), ("every", lambda x: x >= 1))
    )
    theirs = average_after(50, decay, int(every), micro, walk)
    if abs(float(ours.copy.tensors["w"]) - theirs) > 1e-5:
        yield f"the average is {float(ours.copy.tensors['w'])} after 50 updates, there {theirs}"


def coefficients(experiment: str, config: Any) -> Iterator[str]:
    if experiment not in KERNELS:
        return
    key = "eta" if "eta" in config.algorithm.sde else "noise_level"
    level = numbers(experiment, f"algorithm.sde.{key}")
    grid = np.linspace(1, 0, config.sampling.steps + 1)
    grid = 3 * grid / (1 + 2 * grid)
    std = KERNELS[experiment](grid, level[0])
    drawn = np.random.default_rng(5).normal(size=(2, config.sampling.steps, 3))
    x, v = (torch.from_numpy(part) for part in drawn)
    s, s1 = (torch.from_numpy(part.copy())[:, None] for part in (grid[:-1], grid[1:]))
    guard = torch.where(s == 1, s1, s)
    mean, found, scale = instantiate(config.algorithm.sde).moments(
        x, v, s, s1, guard, (s - s1).sqrt()
    )
    dt, sigma = np.diff(grid)[:, None], grid[:-1, None]
    extra = std[:, None] ** 2 / (2 * sigma)
    theirs, noise = drawn[0] * (1 + extra * dt), std * np.sqrt(-dt[:, 0])
    theirs = theirs + drawn[1] * (1 + extra * (1 - sigma)) * dt
    if experiment.endswith("_cps"):
        noise = grid[1:] * np.sin(level[0] * np.pi / 2)
        std, after = noise / np.sqrt(-dt[:, 0]), grid[1:, None]
        kept = np.sqrt(after**2 - noise[:, None] ** 2)
        theirs = (drawn[0] - sigma * drawn[1]) * (1 - after)
        theirs = theirs + (drawn[0] + (1 - sigma) * drawn[1]) * kept
    for name, a, b in (
        ("mean", mean.numpy(), theirs),
        ("std", found.numpy()[:, 0], std),
        ("noise", scale.numpy()[:, 0], noise),
    ):
        if np.abs(a - b).max() > 1e-6:
            yield f"the SDE's {name} is {np.abs(a - b).max():.3g} apart"


def surrogates(experiment: str, config: Any) -> Iterator[str]:
    """Loss of drawn cells, on both sides of the bound."""
    if experiment not in SURROGATES:
        return
    rule, key = SURROGATES[experiment]
    drawn = np.random.default_rng(11)
    std, sqrt_h = drawn.uniform(0.5, 2.0, (1, 5)), drawn.uniform(0.2, 0.5, (1, 5))
    old_mean, z, way = (drawn.normal(size=(40, 5, 8)) for _ in range(3))
    mean = old_mean + way * 10 ** drawn.uniform(-7, -1, (40, 5, 1))
    scale = (std * sqrt_h)[..., None]
    sample = old_mean + scale * z
    log_prob, old_log_prob = (
        -((sample - at) ** 2 / (2 * scale**2)).mean(-1) for at in (mean, old_mean)
    )
    cells = {"log_prob": log_prob, "old_log_prob": old_log_prob, "mean": mean, "std": std}
    cells |= {"old_mean": old_mean, "sqrt_h": sqrt_h, "A": drawn.normal(size=(40, 1))}
    theirs = rule(cells, numbers(experiment, key)[0])
    given = {name: torch.from_numpy(x) for name, x in cells.items() if name not in ("A", "std")}
    advantages = torch.from_numpy(cells["A"])
    ours = instantiate(config.algorithm.surrogate).loss(
        Cells(
            **given,
            advantages=advantages,
            scale=torch.from_numpy(scale[..., 0]),
            clip=(config.algorithm.clip_range,) * 2,
        )
    )
    if (apart := np.abs(ours.numpy() - theirs).max()) > 1e-9:
        yield f"losses of drawn cells are {apart:.3g} apart"


def decays(experiment: str, config: Any) -> Iterator[str]:
    """The old policy over 300 RL steps; NFT's source counts gradient steps, from 1."""
    if experiment not in FORWARD:
        return
    if "_nft" in experiment:
        delay, ramp, ceiling = (
            numbers(experiment, f"algorithm.old_policy.{key}")[0]
            for key in ("delay", "ramp", "ceiling")
        )
        updates = numbers(experiment, "algorithm.updates_per_batch")[-1]
    else:  # `min(0.3, 0.001 * global_step)`, one gradient step an RL step
        ceiling, ramp = (
            find(numbers(experiment, f"algorithm.old_policy.{key}"))
            for key, find in (("ceiling", max), ("ramp", min))
        )
        delay, updates = 0.0, 1.0
    ours = instantiate(config.algorithm.old_policy)
    for step in range(300):
        theirs = min(max(updates * (step + 1) - delay, 0) * ramp, ceiling)
        if abs(ours.decay_after(step) - theirs) > ramp * 1.001:
            yield f"the old policy keeps {ours.decay_after(step)} after RL step {step}, there {theirs}"
            return


def batch(experiment: str, config: Any) -> Iterator[str]:
    """Prompts of a batch: machines x GPUs, or as the literals say."""
    if experiment not in ADVANTAGES:
        return
    found = numbers(experiment, "data.prompts_per_batch")
    prompts = {
        "flux1_dancegrpo": lambda: found[0] * found[1],
        "flux1_mixgrpo": lambda: found[0] * found[1],
        "hunyuanvideo_dancegrpo": lambda: found[0] * found[1],
        "wan21_videoalign": lambda: found[0] * found[1],
        "wan21_dancegrpo": lambda: found[0] * 2,  # --train_batch_size
        "wan21_flowgrpo": lambda: found[0] * found[1] * 8 / 4,  # 8 GPUs, 4 samples a prompt
        "sd35_awm": lambda: found[0] * found[1] * (found[2] ** 2 // 8 // 2) / found[2],
    }.get(experiment, lambda: found[0] if experiment in FORWARD else max(found))
    if prompts() != config.data.prompts_per_batch:
        yield f"{config.data.prompts_per_batch} prompts, in the source {prompts()}"


CHECKS = (
    *(values, advantages, windows, updates, moving_average, coefficients),
    *(surrogates, decays, batch),
)


def wrong(experiment: str, config: Any) -> list[str]:
    return [text for check in CHECKS for text in check(experiment, config)]


RECIPES = sorted({name.split()[0] for name in FACTS})
ALTERED = {
    "flux1_dancegrpo": (
        "algorithm.sde.eta=0.7",
        "algorithm.advantage.unbiased=false",
        "algorithm.updates_per_batch=2",
    ),
    "flux1_mixgrpo": (
        "algorithm.train_steps.overlap=1",
        "reward.rewards.pickscore.weight=1.0",
        "data.updates_split=groups",
    ),
    "hunyuanvideo_dancegrpo": (
        "algorithm.advantage.best_and_worst=2",
        "algorithm.train_steps.fraction=0.5",
    ),
    "wan21_dancegrpo": ("algorithm.clip_range=1e-3", "algorithm.updates_per_batch=2"),
    "wan21_videoalign": ("algorithm.advantage.best_and_worst=2", "algorithm.sde.eta=0.25"),
    "sd35_flowgrpo": (
        "data.updates_split=groups",
        "algorithm.ema.times=1",
        "algorithm.advantage.std=group",
        "algorithm.optimizer.lr=1e-4",
        "algorithm.train_steps._target_=digenrl.diffusion.steps.RandomSubset",
    ),
    "wan21_flowgrpo": (
        "data.updates_split=groups",
        "algorithm.ema.decay=0.99",
        "algorithm.sde.noise_level=1.0",
    ),
    "sd35_pickscore": ("algorithm.kl_weight=0.04", "data.updates_split=groups"),
    "sd35_geneval": ("data.group_size=16", "algorithm.ema.times=1"),
    "sd35_nft": (
        "algorithm.old_policy.ceiling=0.999",
        "algorithm.train_steps.size=8",
        "algorithm.beta=0.1",
        "algorithm.ema.every=8",
    ),
    "sd35_awm": (
        "algorithm.train_steps.stratified=false",
        "algorithm.train_steps.stop=13",
        "algorithm.old_policy.ceiling=0.5",
        "algorithm.matching=huber",
        "algorithm.ema.every=8",
    ),
    "sd35_dgpo": (
        "algorithm.train_steps.stop=6",
        "algorithm.old_policy.ramp=1e-2",
        "algorithm.beta=10",
        "algorithm.advantage.std=batch",
        "algorithm.ratio_clip=5e-2",
    ),
    "qwen_image_nft": ("algorithm.optimizer.lr=1e-4", "data.group_size=8"),
    "flux1_flowgrpo": ("algorithm.sde.noise_level=0.7", "algorithm.ema.times=2"),
    "sd35_cps": (
        "algorithm.train_steps.stop=8",
        "data.updates_split=samples",
        "algorithm.sde.noise_level=0.7",
    ),
    "sd35_guard": (
        "algorithm.surrogate._target_=digenrl.algorithms.surrogates.Clipped",
        "algorithm.clip_range=1e-4",
        "algorithm.ema.times=2",
        "algorithm.advantage.std=batch",
    ),
    "sd35_dppo": (
        "algorithm.surrogate.threshold=1e-3",
        "algorithm.train_steps.untrained=sde",
        "algorithm.advantage.clip=5.0",
        "algorithm.advantage.unbiased=false",
    ),
    "flux1_cps": ("algorithm.train_steps.stop=5", "algorithm.advantage.std=batch"),
    "flux1_guard": ("algorithm.clip_range=2e-6", "algorithm.optimizer.lr=3e-4"),
    "flux1_dppo": ("algorithm.surrogate.threshold=1e-4", "algorithm.advantage.clip=5.0"),
    "sd35_nft_ocr": (
        "algorithm.old_policy.delay=75",
        "data.updates_split=groups",
        "algorithm.beta=1.0",
    ),
    "sd35_nft_geneval": ("algorithm.updates_per_batch=2",),
    "sd35_nft_hpsv2": ("algorithm.old_policy.ramp=0.0075",),
    "flux1_kontext_flowgrpo": ("algorithm.sde.noise_level=0.7", "data.group_size=24"),
    "qwen_image_flowgrpo": ("algorithm.train_steps.stop=8", "data.updates_split=samples"),
}
"""Recipe -> single changes, each of which is another recipe."""


@pytest.mark.parametrize("experiment", RECIPES)
def test_a_recipe_does_what_its_source_does(experiment: str) -> None:
    assert not wrong(experiment, published(experiment))


@pytest.mark.parametrize(
    ("experiment", "change"),
    [(experiment, change) for experiment in RECIPES for change in ALTERED[experiment]],
)
def test_another_value_is_seen(experiment: str, change: str) -> None:
    config = published(experiment).copy()
    OmegaConf.set_readonly(config, False)
    key, _, text = change.partition("=")
    if key.endswith("train_steps._target_"):
        config.algorithm.train_steps = {"_target_": text, "fraction": 0.6}
    else:
        OmegaConf.update(config, key, value(text) if number(text) is None else number(text))
        if key.endswith(
            ("updates_per_batch", "best_and_worst", "times", "overlap", "size", "stop", "delay")
        ):
            OmegaConf.update(config, key, int(text))
    assert wrong(experiment, config)
