"""Count what the planner's cost and memory model needs, and write it into the facts files beside
the adapters.

    python -m benchmarks.count_facts [model ...]        (default: all models)

- Parameters and LoRA parameters, on the meta device at real size.
- Bytes that blocks keep of a forward for its backward pass, by what is trained and what blocks keep
  (`digenrl.recompute`), and the bytes beside them at the peak of both passes. Fake tensors at real
  width stand for those of a GPU.
- FLOPs of one forward and of one decode, by torch's flop counter on the meta device.
- Bytes of a decode, in tiles if the model's option says so.

A model takes some minutes on one core, without a download.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import yaml
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import _families
from benchmarks.live_bytes import Bytes, count_bytes
from digenrl.config import config_directory
from digenrl.diffusion.sde import FlowSDE
from digenrl.models import checkpointing
from digenrl.models.adapter import cast_parameters
from digenrl.models.lora import LoraSpec, inject_lora
from digenrl.recompute import ALL, INPUTS, MODES, parse_recompute

PRESETS = {"attn": "attention", "attn_ff": "attention_ff"}
"""Key of the facts -> value of `model.lora.targets`, for adapters."""
CASES = ((2, 32, 256), (2, 64, 256), (2, 32, 512), (4, 32, 256))
"""(rows, tokens of a side, text tokens) of the cases whose bytes give the four coefficients. No
case has a single row, for which PyTorch copies less."""
MANY_TOKENS = (1, 32, 64)
"""The case whose FLOPs are counted: in earnest there are far more latent tokens than text
tokens."""
DEVICE = "cuda"
"""Forwards are counted on this device, which need not exist. A fused RMS norm keeps no fp32 copy
there, as it does on the CPU, and autocast has a list of operators of its own."""
BACKWARD = "cpu"
"""Backward passes are counted on this device: none runs on one without a driver."""
RANK = 64
"""Rank of the adapters whose activations are counted."""
HEAD = "# Counted by `python -m benchmarks.count_facts MODEL`."


def adapted(model: str, network: nn.Module, trained: str) -> list[str]:
    """Return the layers that the family adapts, by the facts' key of a preset."""
    kind = _families.adapter(_families.models()[model])
    return kind.lora_names(network.config, PRESETS[trained])


def lora_per_rank(model: str, network: nn.Module) -> dict[str, int]:
    """Return preset -> LoRA parameters per unit of rank: sum of (in + out) over its layers."""
    layers: dict[str, Any] = dict(network.named_modules())
    return {
        key: sum(
            layers[name].in_features + layers[name].out_features
            for name in adapted(model, network, key)
        )
        for key in PRESETS
    }


def flops(model: str, network: nn.Module, grid: _families.Grid, text: int, rows: int = 1) -> float:
    """Return the FLOPs of one forward of `network`, attention included. `network` is on the meta
    device."""
    facts = _families.models()[model]
    policy = _families.policy(facts, grid)
    shapes = _families.conditioning(facts, policy, text)
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        policy.transformer = network
        policy.predict(*_families.inputs(policy, rows, shapes, torch.float32))
    return float(counter.get_total_flops())


def without_attention(counter: FlopCounterMode) -> int:
    """FLOPs that were counted so far in matrix products and convolutions."""
    return sum(
        n
        for operator, n in counter.get_flop_counts()["Global"].items()
        if "attention" not in str(operator)
    )


def fake(model: nn.Module, device: str = "cpu") -> None:
    """Replace the meta tensors of `model` by fake ones (inside a FakeTensorMode)."""
    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (
            module._parameters, module._buffers, module.__dict__
        )  # fmt: skip
        for store in stores:
            for name, tensor in list(store.items()):
                if isinstance(tensor, Tensor):
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    trained = isinstance(tensor, nn.Parameter)
                    store[name] = nn.Parameter(made, tensor.requires_grad) if trained else made


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *_: Any,
    **given: Any,
) -> Tensor:
    """Return what fused attention on a GPU returns. Without a driver to ask, PyTorch takes the kernel
    that keeps the products."""
    low = torch.get_autocast_dtype(DEVICE) if torch.is_autocast_enabled(DEVICE) else query.dtype
    query, key, value = (each.to(low) for each in (query, key, value))
    scale = given.get("scale")
    kernels: Any = torch.ops.aten
    if attn_mask is None:
        out = kernels._scaled_dot_product_flash_attention(query, key, value, scale=scale)
    else:
        mask = attn_mask.to(low).expand(*query.shape[:-1], key.shape[-2])
        out = kernels._scaled_dot_product_efficient_attention(
            query, key, value, mask, compute_log_sumexp=True, scale=scale
        )
    made: Tensor = out[0]
    return made


@contextmanager
def autocast(device: str, on: bool) -> Iterator[None]:
    """Compute in bf16 as `torch.autocast`, which asks CUDA for its driver."""
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(device, on)
    torch.set_autocast_dtype(device, torch.bfloat16)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_cache_enabled(kept)


def trainable(name: str, blocks: int, trained: str) -> nn.Module:
    """Return a build on the meta device as `models.policy.Policy` holds it: LoRA over a bf16 base,
    or fp32."""
    model = _families.network(name, blocks)
    if trained == "full":
        return model.eval()
    exact = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    for layer, parameter in model.named_parameters():
        if not any(part in layer for part in exact):
            parameter.data = parameter.data.bfloat16()
    chosen = tuple(map(re.escape, adapted(name, model, trained)))
    inject_lora(model, LoraSpec(RANK, RANK, chosen))
    return model.eval()


class Cells:
    """Two builds of a model that differ by so many units of blocks, and their forwards."""

    def __init__(self, name: str, trained: str) -> None:
        facts = _families.models()[name]
        self.facts, self.full = facts, trained == "full"
        self.policies = {
            side: _families.policy(facts, (1, side, side)) for _, side, _ in (*CASES, MANY_TOKENS)
        }
        # A last block without adapters on what nobody reads keeps less: it is in both builds.
        self.least = 2 if _families.adapter(facts).unread else 1
        self.added = facts.models[name].get("period", 1)
        with torch.device("meta"):
            self.small, self.large, self.generates = (
                trainable(name, self.least + more, trained) for more in (0, self.added, self.added)
            )
            if self.full:  # `Adapter.only_generate`
                for module in self.generates.modules():
                    for parameter in cast_parameters(module):
                        parameter.data = parameter.data.bfloat16()

    def place(self, device: str) -> None:
        """Replace all tensors by fake ones on `device`, with gradients."""
        for model in (self.small, self.large, self.generates):
            fake(model, device)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():  # rotary tables are cached at first use
            for model in (self.small, self.large, self.generates):
                for case in (*CASES[:3], MANY_TOKENS):
                    self.cell(model, *case)

    def cell(self, model: nn.Module, rows: int, side: int, text: int) -> tuple[Any, Tensor]:
        """Return the inputs and the loss of a replayed transition (`diffusion.denoise`)."""
        policy, device = self.policies[side], next(model.parameters()).device
        shapes = _families.conditioning(self.facts, policy, text)
        with torch.device(device), autocast(device.type, self.full):
            given = latents, sigmas, _ = _families.inputs(policy, rows, shapes, torch.bfloat16)
            following = torch.zeros_like(latents)
            policy.transformer = model
            velocity = policy.predict(*given).float()
        taken = FlowSDE().transition(
            latents, velocity, sigmas, sigmas / 2, sigmas, next_latents=following
        )
        assert taken.log_prob is not None
        return (given, following, taken.mean), taken.log_prob.sum()

    def keep(self, mode: str) -> None:
        for model in (self.small, self.large):
            model.disable_gradient_checkpointing()  # type: ignore[operator]
            blocks = [block for part in lists(model) for block in part]
            checkpointing.enable_recompute(model, blocks, parse_recompute(mode))

    def forward(self, model: nn.Module) -> list[Bytes]:
        return [count_bytes(model, lambda c=case: self.cell(model, *c))[1] for case in CASES]  # type: ignore[misc]

    def kept(self) -> list[float]:
        """Return the bytes that one unit keeps in each of `CASES`."""
        pairs = zip(self.forward(self.large), self.forward(self.small), strict=True)
        return [(large.kept - small.kept) / self.added for large, small in pairs]

    def beside(self, kept: list[float]) -> list[float]:
        """Return the bytes beside those that units keep at the peak of both passes: those of a
        block that is computed again, too."""
        found = []
        for case, each in zip(CASES, kept, strict=True):

            def step(case: tuple[int, int, int] = case) -> None:
                _inputs, loss = self.cell(self.large, *case)
                loss.backward()

            peak = count_bytes(self.large, step)[1].peak
            found.append(peak - (self.least + self.added) * each)
        return found

    def linear_flops(self, model: nn.Module) -> tuple[int, int]:
        """Return the FLOPs of a forward, and with its backward pass; attention left out."""
        with FlopCounterMode(display=False) as counter:
            _, loss = self.cell(model, *MANY_TOKENS)
            alone = without_attention(counter)
            loss.backward()
        return alone, without_attention(counter)


def activations(
    name: str, trained: str, repeats: bool = True
) -> tuple[dict[str, Any], dict[str, Any], dict[str, float], dict[str, float]]:
    """Count bytes per latent token, per text token, per row and per forward.

    Return what blocks keep -> bytes of one unit of blocks, by differences of two builds; all or
    inputs -> bytes beside them at the peak of a cell's two passes; what they keep -> share of the
    forward's FLOPs, attention aside, that the backward pass repeats (without `repeats`: nothing);
    and the bytes at the peak of a denoising step.
    """
    table, kept, beside = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    spent, cells = dict[str, float](), Cells(name, trained)
    fused = mock.patch.object(nn.functional, "scaled_dot_product_attention", attend)
    fake = FakeTensorMode()  # one for both: some networks keep the tables that they make
    with fake, fused if DEVICE != "cpu" else nullcontext():
        cells.place(DEVICE)
        with torch.no_grad():
            made = tables(cells.generates)
            peak = fit([made + each.peak for each in cells.forward(cells.generates)])
        for mode in MODES:
            cells.keep(mode)
            kept[mode] = cells.kept()
            table[mode] = fit(kept[mode])
    with fake:
        if BACKWARD != DEVICE:
            cells.place(BACKWARD)
        for mode in MODES:
            cells.keep(mode)
            if mode in (ALL, INPUTS):
                kept[mode] = cells.kept() if BACKWARD != DEVICE else kept[mode]
                beside[mode] = fit([made + each for each in cells.beside(kept[mode])])
            if repeats:
                (few, few_both), (many, many_both) = map(
                    cells.linear_flops, (cells.small, cells.large)
                )
                spent[mode] = (many_both - few_both) / (many - few)
    # A block that is computed again keeps what it keeps on `DEVICE`.
    sizes = _families.models()[name].models[name]
    units = 1 if "period" in sizes else sizes["attention_blocks"] / sizes["blocks"]
    beside[INPUTS] = {
        key: beside[INPUTS][key] + (table[ALL][key] - here) / units
        for key, here in fit(kept[ALL]).items()
    }
    return table, beside, {mode: round(n - spent[ALL], 6) for mode, n in spent.items()}, peak


def fit(figures: list[float]) -> dict[str, float]:
    """Return the coefficients of what was counted of `CASES`."""
    (rows, side, text), (_, larger, _), (_, _, longer), (more, _, _) = CASES
    base, image, words, several = figures
    token = (image - base) / (larger**2 - side**2) / rows
    word = (words - base) / (longer - text) / rows
    row = (several - base) / (more - rows)
    return {
        "token": token,
        "text": word,
        "row": row - side**2 * token - text * word,
        "forward": base - rows * row,
    }


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Return how many parameters there are: all, those of the largest block, and those outside the
    blocks."""
    of_blocks = [sum(p.numel() for p in b.parameters()) for part in lists(model) for b in part]
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "parameters": parameters,
        "largest_block_parameters": max(of_blocks),
        "outside_parameters": parameters - sum(of_blocks),
    }


def stored_buffers(model: nn.Module) -> int:
    """Return the numbers of the tables that a checkpoint has beside the weights."""
    stored = model.state_dict().keys()
    return sum(table.numel() for name, table in model.named_buffers() if name in stored)


def tables(model: nn.Module) -> int:
    """Return the bytes of the tables, those of positions, that a network makes once on its device
    and does not store."""
    device = next(model.parameters()).device
    stored = {tensor.untyped_storage()._cdata for tensor in model.state_dict().values()}
    made = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for module in model.modules()
        for tensor in tree_leaves({**vars(module), "_parameters": None, "_modules": None})
        if isinstance(tensor, Tensor) and tensor.device == device
    }
    return sum(size for key, size in made.items() if key not in stored)


def lists(model: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of blocks, of one network or of both experts."""
    found = [part for part in model.children() if isinstance(part, nn.ModuleList)]
    return found or [part for network in model.children() for part in lists(network)]


def model_facts(name: str) -> dict[str, Any]:
    """Return everything that is counted of a model."""
    facts = _families.models()[name]
    sizes = facts.models[name]
    with torch.device("meta"):
        model = _families.network(name)
    counted = {trained: activations(name, trained) for trained in ("full", *PRESETS)}
    buffers = stored_buffers(model)
    return {
        **parameter_counts(model),
        **({"buffers": buffers} if buffers else {}),
        "tensors": sum(1 for _ in model.parameters()),
        "lora_parameters_per_rank": lora_per_rank(name, model),
        "flops": [
            {"tokens": f * h * w, "text": text, "flops": flops(name, model, (f, h, w), text)}
            for text in (sizes["text_tokens"], sizes["text_tokens"] // 2)
            for f, h, w in sizes["points"]
        ],
        "kept_bytes": {trained: found[0] for trained, found in counted.items()},
        "beside_bytes": {trained: counted[trained][1] for trained in ("full", "attn_ff")},
        "repeated_flops": {trained: found[2] for trained, found in counted.items()},
        "forward_bytes": {trained: counted[trained][3] for trained in ("full", "attn_ff")},
        "decode": decoder(name),
    }


def _decode_peak(vae: Any, policy: Any) -> int:
    return count_bytes(
        vae, lambda: policy.codec.decode_latents(vae, torch.zeros(1, *policy.latent_shape))
    )[1].peak


def decoder(name: str) -> dict[str, Any]:
    """Return the counts of the autoencoder: parameters, FLOPs of a decode per 8 x 8 pixels of an
    output frame, and bytes of a decode beside the weights."""
    facts = _families.models()[name]
    frames, rows, columns = facts.decoded
    codec = _families.adapter(facts).codec_class
    tokens = codec.spatial_stride // codec.vae_stride
    option = config_directory() / "model" / f"{name}.yaml"
    tiling = yaml.safe_load(option.read_text(encoding="utf-8")).get("vae_tiling", False)

    more = frames if codec.temporal_stride is None else frames + 8
    base, *others = policies = [
        _families.policy(facts, (count, side // tokens, columns // tokens))
        for count, side in ((frames, rows), (frames, 2 * rows), (more, rows))
    ]
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        vae: Any = _families.decoder(facts)
        base.codec.decode_latents(vae, torch.zeros(1, *base.latent_shape))
    with FakeTensorMode(), torch.no_grad():
        fake(vae)
        if tiling:
            vae.enable_tiling()
        usual, larger, longer = (_decode_peak(vae, each) for each in policies)
    pixels, shown = base.codec.height * base.codec.width, base.codec.frames
    per_pixel = (larger - usual) / pixels
    per_frame = (longer - usual) / max(1, others[1].codec.frames - shown)
    # Tiles are as large in every picture, which is put together from them.
    both = per_pixel / shown if tiling else per_frame / pixels
    counts = {
        "pixel": 0.0 if tiling else per_pixel - both * shown,
        "frame": per_frame - both * pixels if tiling else 0.0,
        "both": both,
    }
    return {
        "parameters": sum(p.numel() for p in vae.parameters()),
        "flops_per_latent_pixel_frame": counter.get_total_flops() / (pixels / 64) / shown,
        "bytes": {"fixed": usual - per_pixel * pixels - counts["frame"] * shown, **counts},
    }


def write(name: str, found: dict[str, Any]) -> None:
    """Write the counts of a model into the second document of its facts file."""
    path = _families.models()[name].file
    by_hand, _, rest = path.read_text(encoding="utf-8").partition("\n---\n")
    counts = (yaml.safe_load(rest) or {}) | {name: found}
    text = yaml.safe_dump(counts, default_flow_style=None, sort_keys=False, width=120)
    path.write_text(f"{by_hand.rstrip()}\n---\n{HEAD}\n{text}", encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # or every collection would walk through all modules
    for name in sys.argv[1:] or _families.models():
        write(name, model_facts(name))
        print(name, flush=True)


if __name__ == "__main__":
    main()
