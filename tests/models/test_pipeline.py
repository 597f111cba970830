"""What a pipeline of diffusers adds to its transformer: how much is decoded at once, where the decoder
stays, its grid and its pictures; on tiny builds, each by a small calculation of its own."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from digenrl import recompute
from digenrl.models import checkpointing, pipeline, pretrained
from tests.models.tiny_policies import VIDEO, make, size


@pytest.fixture(scope="module")
def policy() -> Any:
    return make("sd3")


@pytest.mark.parametrize(
    ("family", "times", "parts"),
    [
        ("sd3", 2.0, [2, 2, 1]),
        ("sd3", 2.9, [2, 2, 1]),
        ("sd3", 0.5, [1] * 5),
        ("wan", 2.0, [2, 2, 1]),
        ("wan", 1.0, [1] * 5),
    ],
)
def test_as_many_samples_are_decoded_together_as_their_pixels_allow(
    family: str, times: float, parts: list[int]
) -> None:
    sizes = size(family)
    one = sizes["height"] * sizes["width"] * sizes.get("frames", 1)
    made, asked = make(family, decode_pixels=int(times * one)), list[int]()
    shape = (3, sizes["frames"]) if family in VIDEO else (3,)

    def decoded(vae: Any, latents: Tensor) -> Tensor:
        asked.append(len(latents))
        return torch.full((len(latents), *shape, sizes["height"], sizes["width"]), -3.0)

    made.decode_latents = decoded  # type: ignore[method-assign]
    vars(made)["_vae"] = SimpleNamespace(device=torch.device("cpu"))
    media = made.decode(torch.zeros(5, *made.latent_shape))
    assert asked == parts
    assert media.shape[0] == 5
    assert (media == 0.0).all(), "cut to what a picture may hold"


@pytest.mark.parametrize(("more", "away"), [(0, False), (1, True)])
@pytest.mark.parametrize("offload", [False, True])
def test_a_decoder_goes_back_to_the_host_only_if_it_is_large_and_came_from_there(
    policy: Any, monkeypatch: pytest.MonkeyPatch, more: int, away: bool, offload: bool
) -> None:
    moved: list[Any] = []
    weight = torch.zeros(10)
    vae = SimpleNamespace(device="host", to=moved.append, parameters=lambda: [weight, weight])
    monkeypatch.setitem(vars(policy), "_vae", vae)
    monkeypatch.setattr(policy, "offload_encoders", offload)
    monkeypatch.setattr(pipeline, "STAYS", 2 * weight.nbytes - more)
    size_ = (1, 3, policy.height, policy.width)
    monkeypatch.setattr(policy, "decode_latents", lambda vae, latents: torch.zeros(size_))
    media = policy.decode(torch.zeros(1, *policy.latent_shape))
    assert torch.equal(media, torch.full(size_, 0.5))
    assert moved == [torch.device("cpu")] + ["cpu"] * (away and offload)
    moved.clear()
    vae.device = torch.device("cpu")
    policy.decode(torch.zeros(1, *policy.latent_shape))
    assert moved == [], "it was there already"
    policy.width += 1
    with pytest.raises(ValueError, match="override `decode_latents`"):
        policy.decode(torch.zeros(1, *policy.latent_shape))
    policy.width -= 1


def test_a_grid_without_shift_is_even_and_a_shifted_one_as_computed_by_hand(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shift in (1.0, 3.0):
        monkeypatch.setattr(policy, "shift", shift)
        even = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
        wanted = shift * even / (1 + (shift - 1) * even)
        torch.testing.assert_close(policy.sigma_grid(4), wanted)
        assert torch.equal(policy.sigma_grid(1), torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="at least one denoising step"):
        policy.sigma_grid(0)


def test_black_is_minus_one_and_white_is_one_in_each_colour(policy: Any) -> None:
    whole = (policy.width, policy.height)
    for colour in ((0, 0, 0), (255, 255, 255), (255, 0, 51)):
        picture = Image.new("RGB", whole, colour)
        image: Any = SimpleNamespace(fitted=lambda height, width, picture=picture: picture)
        found = policy.pixels(image)
        assert found.shape == (1, 3, policy.height, policy.width)
        wanted = torch.tensor([2 * each / 255 - 1 for each in colour]).view(1, 3, 1, 1)
        torch.testing.assert_close(found, wanted.expand_as(found))


def test_every_block_is_compiled_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: made.append((self, how)))
    limit = torch._dynamo.config.recompile_limit
    try:
        compiled = make("sd3", compile=True)
        assert torch._dynamo.config.recompile_limit == max(limit, pipeline.COMPILED_CASES)
    finally:
        torch._dynamo.config.recompile_limit = limit
    assert [block for block, _ in made] == compiled.wrap_units()
    assert all(how == {"fullgraph": True} for _, how in made)
    for kept in ("attention", "products", {"attention": 0.5, "products": 0.5}):
        with pytest.raises(ValueError, match=r"set model\.compile=false"):
            make("sd3", compile=True, gradient_checkpointing=kept)


def test_extensions_are_asked_for_by_their_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "extension", lambda *asked: asked)
    rooms = "digenrl.extensions"
    assert pipeline._quantized("quantize", "nf4") == (
        f"{rooms}.quantized.networks.quantize", "model.quantize = nf4", "set model.quantize=null",
    )  # fmt: skip
    assert pipeline._deferred("empty") == (
        f"{rooms}.deferred.networks.empty", "model.empty = true", "leave it out",
    )  # fmt: skip


def test_a_product_is_kept_from_as_many_inputs_for_each_output_on() -> None:
    keeps = partial(checkpointing._keeps, 2.0, None, next(iter(checkpointing._PRODUCTS)))
    first = next(iter(checkpointing._PRODUCTS.values()))
    for inputs, kept in ((7, False), (8, True), (9, True)):
        given = [torch.zeros(1)] * first + [torch.zeros(3, inputs), torch.zeros(inputs, 4)]
        save, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
        assert keeps(*given) == (save if kept else again)


def test_a_cheap_product_is_made_again_and_one_that_closes_a_block_is_kept() -> None:
    """The figures are of the table in the module: inputs for each output."""
    product, save = torch.ops.aten.mm.default, CheckpointPolicy.MUST_SAVE
    for least, inputs in ((checkpointing.PRODUCTS_FROM, 17), (checkpointing.ATTENTION_FROM, 200)):
        for given, kept in ((inputs, True), (inputs - 1, False)):
            factors = torch.zeros(1, given), torch.zeros(given, 100)
            assert (checkpointing._keeps(least, None, product, *factors) == save) == kept


def test_both_branches_of_guidance_have_gradients_unless_an_algorithm_says_otherwise(
    policy: Any,
) -> None:
    assert policy.detach_unconditional is False


@pytest.mark.parametrize("operator", list(checkpointing._PRODUCTS), ids=str)
def test_factors_of_a_product_are_found_among_its_arguments(operator: Any) -> None:
    names = [argument.name for argument in operator._schema.arguments]
    first = checkpointing._PRODUCTS[operator]
    pairs = (["self", "mat2"], ["mat1", "mat2"], ["batch1", "batch2"])
    assert names[first : first + 2] in pairs


def test_an_adapter_is_merged_once_and_only_where_every_sum_is_finite() -> None:
    merged, broken = make("sd3"), make("sd3")
    broken.load_trained_parameters(
        {name: torch.full_like(p, torch.inf) for name, p in broken.trained_parameters().items()}
    )
    with pytest.raises(ValueError, match=r"(?i)nan|unsafe"):
        broken.merge_adapter()
    merged.merge_adapter()
    assert (merged.lora, merged.lora_layers) == (None, [])
    assert not any("lora" in name for name, _ in merged.named_parameters())


def test_progress_bars_are_off_in_both_libraries() -> None:
    for library in (diffusers, transformers):
        library.utils.logging.enable_progress_bar()
    pretrained.hide_progress_bars()
    for library in (diffusers, transformers):
        assert not library.utils.logging.is_progress_bar_enabled()


def test_each_block_keeps_what_its_mode_says(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(checkpointing, "checkpoint", lambda *args, **how: done.append((args, how)))
    blocks = {mode: (lambda *args, mode=mode: (mode, *args)) for mode in "ABCDEF"}
    modes: Any = dict(
        zip(
            blocks.values(),
            (recompute.ALL, recompute.OFFLOAD, recompute.INPUTS, recompute.ATTENTION, recompute.PRODUCTS),
            strict=False,
        )
    )  # fmt: skip
    run = partial(checkpointing._run, modes, lambda *args: ("off", *args))
    a, b, c, d, e, f = blocks.values()
    assert run(a, 1, 2) == ("A", 1, 2)
    assert run(f, 1) == ("F", 1), "a block that nobody named keeps everything"
    assert run(b, 1) == ("off", b, 1)
    assert done == []
    for block in (c, d, e):
        run(block, 3)
    plain = {"use_reentrant": False, "preserve_rng_state": False}
    assert done[0] == ((c, 3), plain)
    limits = (checkpointing.ATTENTION_FROM, checkpointing.PRODUCTS_FROM)
    for (args, how), block, limit in zip(done[1:], (d, e), limits, strict=True):
        assert args == (block, 3)
        contexts = how.pop("context_fn")
        assert how == plain
        assert contexts.func is checkpointing.create_selective_checkpoint_contexts
        (keeps,) = contexts.args
        assert (keeps.func, keeps.args) == (checkpointing._keeps, (limit,))


@pytest.mark.parametrize(
    ("operator", "kept"),
    [
        ("aten._scaled_dot_product_flash_attention.default", True),
        ("flash_attn_3._forward", True),
        ("aten._scaled_dot_product_flash_attention_backward.default", False),
        ("flash_attn.backward", False),
        ("aten.add.Tensor", False),
    ],
)
def test_fused_attention_is_kept_by_its_name(operator: str, kept: bool) -> None:
    found = checkpointing._keeps(9.0, None, operator)
    assert (found == CheckpointPolicy.MUST_SAVE) == kept


def test_nothing_is_switched_on_where_every_block_keeps_everything() -> None:
    enabled: list[Any] = []
    transformer = SimpleNamespace(enable_gradient_checkpointing=enabled.append)
    blocks = [nn.Linear(1, 1), nn.Linear(1, 1)]
    for given, count in ((False, 0), (True, 1), (0.5, 1)):
        enabled.clear()
        checkpointing.enable(transformer, blocks, recompute.parse_recompute(given))
        assert len(enabled) == count
    modes, offload = enabled[0].args
    assert list(modes) == blocks
    assert sorted(modes.values()) == sorted([recompute.ALL, recompute.INPUTS])
    assert offload is None
