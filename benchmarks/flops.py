"""Matrix FLOPs that one RL step executes, over the least that its recipe needs.

`python -m benchmarks.flops [recipes=a,b] [peer=DIR]`: every recipe at tiny width, real classes, on
the CPU, without recomputation. Executed is what torch's FlopCounterMode counts while the run's own
engine generates a task and its own algorithm trains that task's cells. The least is counted apart:
one forward of one sample per denoising step, and per evaluation of the network that the loss is
made of. Of every product only the rows count that a gradient of the velocity reaches. Padding that
nobody reads is waste, and so is text that the last blocks drop. In the backward pass, the gradient
of an input is needed if the input depends on trained weights. The gradient of a weight is needed if
the weight is trained. A ratio of 1.00 means that nothing is computed twice or for nothing.

Encoding, decoding and scoring are left out; a run does each once per sample. PyTorch's plain
attention is used, whose backward pass recomputes nothing.

With peer=DIR, a checkout of yifan123/flow_grpo (see `benchmarks.peers`), its own scripts generate
and train samples of the same recipe, build, size, steps and text. They are counted alike.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import _families
from benchmarks._random_builds import fill
from benchmarks._shared import Report, options
from benchmarks.peers import ALONE, peer_command
from digenrl import config as configuration
from digenrl.data import PromptData
from digenrl.diffusion.denoise import expand_condition
from digenrl.extensions.planner.advice import PlannerAdvisor
from digenrl.extensions.planner.cli.profile import training_batch
from digenrl.models import pretrained
from digenrl.models import tiny as tiny_builds
from digenrl.models.guidance import NEGATIVE
from digenrl.models.lora import AdaptedLinear
from digenrl.models.policy import Policy
from digenrl.parts import schedule_spec
from digenrl.run import engine_of
from digenrl.schedule import Task
from digenrl.settle import with_task_size

NOTES = """
Rows twice: evaluations of the network for the same sample, noise level and weights. Where a recipe makes
the noise of several samples equal (one for a group, one for a pair), their first noise level is one input
for each, and counts for each. Tiny: builds of
`hardware=cpu_tiny`, whose few tokens and blocks make padding and the last block weigh more. Real: the
products of the published network at 256 x 256 pixels (videos: 9 frames), with the shares of their rows
that are read in a network as deep with two heads. There every token of text is read (with guidance the
shorter of two texts is padded, which the tiny builds show), and rows twice are left out, because their
share depends on a recipe's steps and task size."""
DEFAULTS = {"recipes": "all", "peer": ""}
QUICK = {"recipes": "flux1_flowgrpo,sd35_flowgrpo,zimage_flowgrpo"}
BAR = 1.05
"""Most that a recipe may execute, over the least."""
WORDS = (
    "reward=jpeg",
    "schedule.tsp.batch=all",
    "model.gradient_checkpointing=false",
    "logger=none",
)
OWN = {"digits_dpo": ("hardware=cpu", "sampling.task_size=8")}
"""Recipe -> words in place of the tiny hardware, where it compares more samples than that has."""
SCRIPTS = {"sd35_flowgrpo": ("train_sd3", "sd3"), "flux1_flowgrpo": ("train_flux", "flux")}
"""Recipe -> script of flow_grpo that it follows, and family of the tiny build."""
PEER_SAMPLES = 8
LINEAR, ATTEND = torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention
PRODUCTS = {torch.matmul, torch.bmm, torch.mm, torch.baddbmm, torch.addmm, Tensor.matmul, Tensor.bmm,
            Tensor.__matmul__}  # fmt: skip
CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}


@dataclass
class Product:
    """One matrix product of a forward, and which of its rows anyone reads."""

    flops: float
    """FLOPs of the product as it was executed."""
    backward: float
    """FLOPs of its backward pass over those of its forward pass, that the trained weights need."""
    read: float = 0.0
    """Share of its rows that the velocity depends on."""


class Products(TorchFunctionMode):
    """Takes down the products of a forward; a backward pass afterwards tells which rows are
    read."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Product] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is ATTEND:
            return self._attention(func, *args, **kwargs)
        out = func(*args, **kwargs)
        if func is LINEAR or func in CONVOLUTIONS:
            given = dict(zip(("input", "weight"), args, strict=False)) | kwargs
            value, weight = given["input"], given["weight"]
            inner = weight[0].numel()
            self._take(
                out, 2.0 * out.numel() * inner, (value, weight), 1 if func is not LINEAR else -1
            )
        elif func in PRODUCTS:
            tensors = [each for each in args if isinstance(each, Tensor)]
            left, right = tensors[-2:]
            if left.dim() and right.dim():
                self._take(out, 2.0 * out.numel() * left.shape[-1], (left, right), -1)
        return out

    def _attention(
        self, func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any
    ) -> Tensor:
        out: Tensor = func(query, key, value, *args, **more)
        heads, rows, width = query.shape[-3], query.shape[-2], query.shape[-1]
        flops = 2.0 * query.shape[0] * heads * rows * key.shape[-2] * (width + value.shape[-1])
        asks = [each for each in (query, key, value) if each.requires_grad]
        product = Product(flops, 2.0 * bool(asks) * torch.is_grad_enabled())
        self.found.append(product)
        shares: dict[str, float] = {}

        def told(name: str) -> Callable[[Tensor], None]:
            def hook(gradient: Tensor) -> None:
                shares[name] = float((gradient != 0).any(dim=-1).any(dim=1).double().mean())
                product.read = shares.get("rows", 0.0) * shares.get("keys", 0.0)

            return hook

        if value.requires_grad:
            value.register_hook(told("keys"))
        if out.requires_grad:
            out.register_hook(told("rows"))
        return out

    def _take(self, out: Tensor, flops: float, factors: tuple[Tensor, Tensor], across: int) -> None:
        if not flops:  # a layer that is given no tokens
            return
        asks = sum(each.requires_grad for each in factors)
        product = Product(flops, float(asks) * torch.is_grad_enabled())
        self.found.append(product)

        def told(gradient: Tensor) -> None:
            product.read = float((gradient != 0).any(dim=across).double().mean())

        if out.requires_grad:
            out.register_hook(told)


@dataclass(frozen=True)
class Needed:
    """Needed and executed FLOPs of a sample at a noise level."""

    forward: float
    executed: float
    """FLOPs that a forward of it executes."""
    backward: float
    backward_executed: float


@dataclass
class Evaluations:
    """Rows for which `Policy.velocity` was asked, each counted once for what computes it."""

    seen: set[Any] = field(default_factory=set)
    asked: int = 0

    def take(self, policy: Policy, latents: Tensor, sigmas: Tensor) -> None:
        """Count the rows of one call: again only with other weights, or with a gradient. Equal rows
        of one call are samples of their own, whose noise the recipe makes equal."""
        weights = tuple(p.data_ptr() for p in policy.adapter.trained_parameters().values())
        how = (policy.adapter.in_reference, torch.is_grad_enabled(), hash(weights))
        self.asked += len(latents)
        equal = Counter[Any]()
        for row, sigma in zip(latents.detach(), sigmas.tolist(), strict=True):
            one = (*how, sigma, hash(row.contiguous().numpy(force=True).tobytes()))
            self.seen.add((*one, equal[one]))
            equal[one] += 1

    def count(self, base: bool, gradient: bool) -> int:
        """Return the distinct rows by the weights and by whether a gradient was asked for."""
        return sum(how[:2] == (base, gradient) for how in self.seen)


@contextmanager
def watched(policy: Policy) -> Iterator[Evaluations]:
    """Take down for which rows the body asks for a velocity."""
    found, own = Evaluations(), policy.velocity

    def velocity(latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        found.take(policy, latents, sigmas)
        return own(latents, sigmas, condition)

    object.__setattr__(policy, "velocity", velocity)
    try:
        yield found
    finally:
        object.__delattr__(policy, "velocity")


def forward(policy: Policy, condition: dict[str, Tensor], sigma: float) -> list[Product]:
    """Return the products of one sample's velocity, after a gradient has told what is read."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, *policy.latent_shape, generator=generator)
    with Products() as products:
        velocity = policy.velocity(latents, torch.tensor([sigma]), expand_condition(condition, 1))
    velocity = velocity[:, : policy.drawn] if policy.drawn is not None else velocity
    if velocity.requires_grad:  # the base model's depends on no trained weight
        (velocity * torch.randn(velocity.shape, generator=generator)).sum().backward()
    for parameter in policy.parameters():
        parameter.grad = None
    return joined(policy, products.found)


def joined(policy: Policy, found: list[Product]) -> list[Product]:
    """Return the products of a velocity, where each branch of guidance had a forward of its own as
    if both had shared one. The unconditional branch came first, without gradient."""
    if not (policy.two_forwards and policy.detach_unconditional):
        return found
    half = len(found) // 2
    return [
        Product(one.flops + other.flops, 0.5 * other.backward, other.read)
        for one, other in zip(found[:half], found[half:], strict=True)
    ]


def readings(
    policy: Policy, condition: dict[str, Tensor], sigma: float
) -> tuple[list[Product], list[Product]]:
    """Return the products of one sample twice. First everything is differentiable, and a gradient
    shows what is read. Then the trained weights alone are, and it shows what goes back."""
    flags = {p: p.requires_grad for p in policy.parameters()}
    apart, policy.detach_unconditional = policy.detach_unconditional, False
    for parameter in flags:
        parameter.requires_grad_(True)
    whole = forward(policy, condition, sigma)
    for parameter, flag in flags.items():
        parameter.requires_grad_(flag)
    policy.detach_unconditional = apart
    trained = forward(policy, condition, sigma)
    return whole, trained


def needed(policy: Policy, condition: dict[str, Tensor], sigma: float) -> Needed:
    """Return what one sample needs and executes."""
    whole, trained = readings(policy, condition, sigma)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        latents = torch.randn(1, *policy.latent_shape)
        policy.velocity(latents, torch.tensor([sigma]), expand_condition(condition, 1))
    executed = float(counter.get_total_flops())
    taken = sum(product.flops for product in whole)
    if not math.isclose(taken, executed, rel_tol=1e-6):
        raise RuntimeError(f"{policy.family}: {taken} FLOPs were taken down, {executed} executed")
    return Needed(
        sum(product.flops * product.read for product in whole),
        executed,
        sum(product.flops * product.read * product.backward for product in trained),
        sum(product.flops * product.backward for product in trained),
    )


@torch.no_grad()
def randomise(policy: Policy) -> None:
    """Give adapters values: at first they are zero and pass no gradient on."""
    for layer in policy.modules():
        if isinstance(layer, AdaptedLinear):
            torch.nn.init.normal_(layer.lora_B["default"].get_parameter("weight"), std=0.02)


@dataclass(frozen=True)
class Ratio:
    """What a recipe executes, over the least."""

    name: str
    generated: float
    trained: float
    whole: float
    forward: float
    """Ratio of one forward alone, which is above 1 for rows that nobody reads."""
    repeated: int
    """Rows for which the same was computed twice."""
    forwards: int
    """Rows of all distinct evaluations."""
    graded: int
    """Rows of the evaluations with a gradient."""
    sized: bool
    """Whether the model has a published size."""
    sample: float
    """Least FLOPs of one sample, generated and trained."""
    explained: float
    """FLOPs of training by the products that were taken down, over those that were counted."""


def counted(work: Callable[[], Any]) -> float:
    """Return the FLOPs of `work`."""
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


def composed_of(name: str, *more: str) -> configuration.Composed:
    """Return the recipe's configuration at tiny width."""
    words = [f"experiment={name}", *(OWN.get(name) or ("hardware=cpu_tiny",)), *WORDS, *more]
    return with_task_size(configuration.load(words), PlannerAdvisor())


def ratio(name: str, *more: str) -> Ratio:
    """Generate a task of the recipe and train its cells, as a run does, and set it beside the
    least. `more` are words of its configuration."""
    composed = composed_of(name, *more)
    config = composed.settings
    torch.manual_seed(0)
    policy: Policy = config.build("model")
    randomise(policy)
    module = config.build("algorithm", policy=policy)
    module.train()
    module.on_train_start()
    rewards = config.build("reward")
    engine = engine_of(config, module, rewards)
    spec = schedule_spec(
        config, module.train_steps.count_trained(config.sampling.steps), trainers=1
    )
    prompt = PromptData(config.data, config.seed).sampler.prompts_at(0)[0]
    condition = policy.codec.encode([prompt])
    task = Task(step=0, index=0, group=0, first_sample=0, samples=spec.task_size, version=0)
    held: list[Any] = [engine.begin_task(task, prompt)]

    def generate() -> None:
        while engine.steps_left(held[0]):
            held[0] = engine.take_step(held[0])

    with sdpa_kernel(SDPBackend.MATH), watched(policy) as made:
        generating = counted(generate)
    scored = engine.score(held[0], engine.decode(held[0])).result()
    batch = training_batch(scored, spec, engine.reward_weights)

    def train() -> None:
        module.training_step(batch, 0).backward()

    with sdpa_kernel(SDPBackend.MATH):
        with watched(policy) as asked:
            training = counted(train)
        module.zero_grad(set_to_none=True)
        one = needed(policy, condition, float(policy.sigma_grid(config.sampling.steps)[1]))
        with (
            policy.adapter.reference() if policy.adapter.has_reference else contextlib.nullcontext()
        ):
            base = needed(policy, condition, float(policy.sigma_grid(config.sampling.steps)[1]))
    engine.close()
    others = asked.count(True, False)
    unmarked = len(asked.seen) - others
    least_made = made.count(False, False) * one.forward
    least_trained = (
        asked.count(False, True) * (one.forward + one.backward)
        + asked.count(False, False) * one.forward
        + others * base.forward
    )
    return Ratio(
        name,
        generating / least_made if least_made else 1.0,  # samples from files
        training / least_trained,
        (generating + training) / (least_made + least_trained),
        one.executed / one.forward,
        made.asked + asked.asked - len(made.seen) - len(asked.seen),
        len(made.seen) + len(asked.seen),
        asked.count(False, True),
        composed.choices["model"] in _families.models(),
        (least_made + least_trained) / spec.task_size,
        (
            asked.count(False, True) * one.backward_executed
            + unmarked * one.executed
            + others * base.executed
        )
        / training,
    )


WIDTHS = (
    "num_attention_heads", "n_heads", "n_kv_heads", "num_key_value_heads", "dim", "ffn_dim",
    "caption_projection_dim", "audio_num_attention_heads", "cross_attention_dim",
    "audio_cross_attention_dim", "inner_dim", "added_kv_proj_dim",
)  # fmt: skip
"""Sizes of a network that `narrow` divides by one number."""
SMALL = ("sampling.height=256", "sampling.width=256")
FEW_FRAMES = "sampling.frames=9"
"""Samples at real width: more text for each token than in a recipe, and thus more waste."""


def narrow(kind: type[Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a network of published depth with two attention heads."""
    defaults = inspect.signature(kind).parameters
    given = {
        name: each.default for name, each in defaults.items() if each.default is not each.empty
    }
    given |= sizes
    heads = given.get("num_attention_heads") or given["n_heads"]
    return dict(sizes) | {
        name: 2 * given[name] // heads for name in WIDTHS if isinstance(given.get(name), int)
    }


def at_real_width(each: Ratio) -> tuple[float, float]:
    """Return (RL step, one forward) of a recipe over the least, with the products of the published
    network. What is read of each product is what is read of it in a narrow network as deep."""
    words = [f"experiment={each.name}", "hardware=single_gpu", *WORDS, *SMALL]
    composed = configuration.load(words)
    if composed.settings.tree.model.get("frames", 1) > 1:
        composed = configuration.load([*words, FEW_FRAMES])
    settings = OmegaConf.to_yaml(composed.settings.tree.model)
    detached = bool(composed.settings.tree.algorithm.get("detach_uncond"))
    rows = published_rows(composed.choices["model"], settings, detached)
    forward = sum(own.flops for own, _, _ in rows)
    least = sum(own.flops * read.read for own, read, _ in rows)
    backward = sum(own.flops * own.backward for own, _, _ in rows)
    needs = sum(own.flops * own.backward * read.read for own, _, read in rows)
    step = each.forwards * forward + each.graded * backward
    return step / (each.forwards * least + each.graded * needs), forward / least


@cache
def published_rows(
    model: str, settings: str, detached: bool
) -> list[tuple[Product, Product, Product]]:
    """Return the products of one sample's velocity in the published network; and of the narrow one
    as `readings` gives them.

    Args:
        settings: YAML of the recipe's model.
        detached: whether guidance trains its conditional branch alone.
    """
    slim, condition = published(model, settings, real=False)
    slim.detach_unconditional = detached
    whole, trained = readings(slim, condition, 0.5)
    policy, there = published(model, settings, real=True)
    policy.detach_unconditional = detached
    with Products() as products:
        latents = torch.empty(1, *policy.latent_shape, device="meta")
        policy.velocity(latents, torch.full((1,), 0.5, device="meta"), there)
    return list(zip(joined(policy, products.found), whole, trained, strict=True))


def published(model: str, settings: str, real: bool) -> tuple[Policy, dict[str, Tensor]]:
    """Return a policy at published depth, and one prompt's conditioning: of real width on the meta
    device, or narrow with random values."""
    facts = _families.models()[model]
    kind, sizes = _families.adapter(facts), facts.models[model]
    device = torch.device("meta" if real else "cpu")

    def component(of: type[Any], path: str, part: str, dtype: torch.dtype) -> nn.Module:
        if real:
            with torch.device("meta"):
                whole: nn.Module = of(**sizes["network"])
            return whole.to(dtype)
        return fill(of(**narrow(of, sizes["network"])), device, torch.float32).eval()

    arguments: Any = OmegaConf.to_container(OmegaConf.create(settings))
    del arguments["_target_"]
    # The meta device knows no autocast.
    arguments |= {"dtype": "float32", "path": str(tiny_builds.ensure(facts))}
    with mock.patch.object(pretrained, "load_component", component), device:
        policy = kind(**arguments)
    if not real:
        randomise(policy)
    shapes = _families.conditioning(facts, policy, int(sizes["text_tokens"]))
    condition = {
        key: torch.randn(1, *shape, device=device)
        for key, shape in shapes.items()
        if not key.endswith("mask")
    }
    negative = {NEGATIVE + key: value for key, value in condition.items()}
    return policy, condition | (negative if policy.two_forwards else {})


def of_peer(sources: Path, name: str, *more: str) -> float:
    """Return the FLOPs that flow_grpo's script executes for one sample of the recipe.

    Raises:
        SystemExit: it failed; with its last lines.
    """
    config, (script, family) = composed_of(name, *more).settings, SCRIPTS[name]
    own = {
        "resolution": config.sampling.height,
        "sample.num_steps": config.sampling.steps,
        "sample.eval_num_steps": 1,
        "sample.guidance_scale": config.sampling.guidance_scale,
        "sample.train_batch_size": PEER_SAMPLES // 2,
        "sample.num_image_per_prompt": PEER_SAMPLES // 2,
        "sample.num_batches_per_epoch": 2,
        "train.batch_size": PEER_SAMPLES // 2,
        "train.gradient_accumulation_steps": 2,
        "train.timestep_fraction": 0.99,
        "train.beta": config.algorithm.kl_weight,
        "eval_freq": 1,
    }
    if script == "train_flux":
        own["sample.same_latent"] = False
    with tempfile.TemporaryDirectory() as folder:
        command = peer_command(sources, Path(folder), script, family, 1, "flops")
        command += [f"--config.{key}={value}" for key, value in own.items()]
        run = subprocess.run(
            command, env=os.environ | ALONE, capture_output=True, text=True, check=False
        )
    if run.returncode or not run.stdout.splitlines():
        raise SystemExit(f"{' '.join(command)} failed:\n{run.stderr[-2000:]}")
    generated, trained = json.loads(run.stdout.splitlines()[-1])
    return float(generated + trained) / PEER_SAMPLES


def beside(report: Report, sources: Path, names: list[str]) -> None:
    """Add the table with flow_grpo's scripts, of those that the checkout has."""
    report.table(("recipe at 256 x 256 px", "least, GFLOP a sample", "over it: ours", "flow_grpo"))
    lower = True
    for name in names:
        if name in SCRIPTS and (sources / "scripts" / f"{SCRIPTS[name][0]}.py").exists():
            own = ratio(name, *SMALL)
            theirs = of_peer(sources, name, *SMALL) / own.sample
            lower = lower and own.whole < theirs
            report.row(name, f"{own.sample / 1e9:.3f}", f"{own.whole:.3f}", f"{theirs:.3f}")
    report.verdict(lower, "less than flow_grpo's script executes, everywhere")


def recipes() -> list[str]:
    """Return every experiment that trains a family of diffusers."""
    folder = Path(str(configuration.config_directory())) / "experiment"
    found = []
    for path in sorted(folder.glob("*.yaml")):
        if not path.stem.startswith("_"):
            with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Exception):
                words = [f"experiment={path.stem}", "hardware=cpu_tiny", *WORDS]
                target = configuration.load(words).settings.tree.model._target_
                found += [path.stem] if "Policy" in target else []
    return found


def main(words: list[str]) -> int:
    """Print and keep the table; the exit code says whether every recipe is below the bar."""
    given = options(words, DEFAULTS, QUICK)
    names = recipes() if given["recipes"] == "all" else given["recipes"].split(",")
    report = Report(
        "Matrix FLOPs executed over the least",
        NOTES,
        ("recipe" + " " * 18, "rows twice", "tiny: forward", "RL step", "real: forward", "RL step"),
    )
    found: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        each, real = ratio(name), None
        with contextlib.suppress(NotImplementedError):  # Wan2.2 chooses its expert by values
            real = at_real_width(each) if each.sized else None
        shares = (each.forward, each.whole, *((real[1], real[0]) if real else ()))
        cells = (
            str(each.repeated),
            *(f"{share:.3f}" for share in shares),
            *["-"] * (4 - len(shares)),
        )
        alike.setdefault(cells, []).append(name)
        print(f"{name}: {' '.join(cells)}", flush=True)
        found[each.sized].append((real[0] if real else each.whole, name))
    for cells, members in alike.items():
        report.row(", ".join(members), *cells)
    if given["peer"]:
        beside(report, Path(given["peer"]).resolve(), names)
    if found[True]:
        worst, name = max(found[True])
        report.verdict(worst <= BAR, f"at most {BAR} over the least, of a published size")
        report.say(f"worst: {worst:.2f} ({name})")
    if found[False]:
        report.say("worst of the embedded tasks: {:.2f} ({})".format(*max(found[False])))
    return report.close(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
