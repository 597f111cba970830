"""What a pipeline of diffusers adds to its transformer: how much is decoded at once, where the
decoder stays, its grid and its pictures. Each is checked on tiny builds, by a small calculation of
its own."""

from __future__ import annotations

import json
import logging
import shutil
from functools import partial
from pathlib import Path
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
from digenrl.models import checkpointing, pipeline, pipeline_codec, pretrained
from digenrl.models import tiny as tiny_builds
from digenrl.models.pretrained import PretrainedError
from digenrl.models.wording import Wording
from digenrl.types import Prompt
from tests.models.tiny_policies import FAMILIES, VIDEO, make, size


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

    made.codec.decode_latents = decoded  # type: ignore[method-assign]
    vars(made.codec)["_vae"] = SimpleNamespace(device=torch.device("cpu"))
    media = made.codec.decode(torch.zeros(5, *made.latent_shape))
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
    monkeypatch.setitem(vars(policy.codec), "_vae", vae)
    monkeypatch.setattr(policy.codec, "offload_encoders", offload)
    monkeypatch.setattr(pipeline_codec, "STAYS", 2 * weight.nbytes - more)
    size_ = (1, 3, policy.codec.height, policy.codec.width)
    monkeypatch.setattr(policy.codec, "decode_latents", lambda vae, latents: torch.zeros(size_))
    media = policy.codec.decode(torch.zeros(1, *policy.latent_shape))
    assert torch.equal(media, torch.full(size_, 0.5))
    assert moved == [torch.device("cpu")] + ["cpu"] * (away and offload)
    moved.clear()
    vae.device = torch.device("cpu")
    policy.codec.decode(torch.zeros(1, *policy.latent_shape))
    assert moved == [], "it was there already"
    policy.codec.width += 1
    with pytest.raises(ValueError, match="override `decode_latents`"):
        policy.codec.decode(torch.zeros(1, *policy.latent_shape))
    policy.codec.width -= 1


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


def test_a_grid_is_shifted_by_the_tokens_of_a_picture(policy: Any) -> None:
    """Along the line through two points that the scheduler's configuration gives."""
    given = {"base_image_seq_len": 2, "max_image_seq_len": 10, "base_shift": 0.3, "max_shift": 0.7}
    tokens = policy.codec.height * policy.codec.width / 256
    wanted = 0.3 + (tokens - 2) * 0.4 / 8
    assert policy._dynamic_shift(given, 4) == pytest.approx(wanted)
    usual = 0.5 + (tokens - 256) * 0.65 / (4096 - 256)
    assert policy._dynamic_shift({}, 4) == pytest.approx(usual)


@pytest.mark.parametrize(
    ("family", "size", "shape"),
    [("sd3", (64, 32, 1), (16, 8, 4)), ("flux", (64, 32, 1), (8, 64)), ("wan", (64, 32, 9), (16, 3, 8, 4))],
)  # fmt: skip
def test_a_sample_has_the_shape_that_the_autoencoder_makes_of_it(
    family: str, size: tuple[int, int, int], shape: tuple[int, ...]
) -> None:
    assert repr(FAMILIES[family].codec_class.latent_shape_of(*size)) == repr(shape), "whole numbers"


def test_the_tiny_encoder_takes_few_tokens_and_pixels_become_those_of_latents() -> None:
    made: Any = make("flux", max_sequence_length=100, height=64, width=32)
    assert (made.codec.max_sequence_length, made.codec.image_grid()) == (64, (8, 4))
    assert all(isinstance(each, int) for each in made.codec.image_grid())


def test_a_family_that_reads_no_pictures_says_so(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = pipeline_codec.DiffusersCodec.encode_latents
    monkeypatch.setattr(type(policy.codec), "encode_latents", plain)
    image: Any = SimpleNamespace(
        fit_to_size=lambda height, width: Image.new("RGB", (width, height))
    )
    with pytest.raises(ValueError, match="sd3 has no `encode_media`"):
        policy.codec.encode_media([image])


def test_a_network_without_values_is_filled_and_no_other(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[tuple[Any, ...]] = []
    monkeypatch.setattr(pipeline.deferred, "fill_parameters", lambda *given: filled.append(given))
    device = torch.device("cpu")
    policy.fill(device)
    assert filled == []
    monkeypatch.setattr(policy, "_empty", True)
    policy.fill(device)
    assert filled == [
        (policy.transformer, policy.path, policy.components, policy.adapter.lora, device, None)
    ]


def test_the_configuration_of_a_network_is_the_checkpoints_with_its_defaults() -> None:
    kind, path = FAMILIES["sd3"], str(tiny_builds.ensure("sd3"))
    real = kind.network_config({"path": path})
    assert real["num_layers"] == len(make("sd3").wrap_units())
    tiny = kind.network_config({"build": "tiny", "path": path})
    assert {name: real.get(name, tiny[name]) for name in tiny} == tiny


def test_black_is_minus_one_and_white_is_one_in_each_colour(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy.codec, "width", policy.codec.height + 16)
    for colour in ((0, 0, 0), (255, 255, 255), (255, 0, 51)):
        image: Any = SimpleNamespace(
            fit_to_size=lambda height, width, colour=colour: Image.new(
                "RGB", (width, height), colour
            )
        )
        found = policy.codec.image_pixels(image)
        assert found.shape == (1, 3, policy.codec.height, policy.codec.width)
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
    for kept in ("attention", "products", "offload", {"attention": 0.5, "products": 0.5}):
        with pytest.raises(ValueError, match=r"set model\.compile=false"):
            make("sd3", compile=True, gradient_checkpointing=kept)


def test_the_blocks_and_no_more_are_quantized_if_the_library_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(pipeline.quantized, "quantize_blocks", lambda *given: asked.append(given))
    monkeypatch.setattr(pipeline.quantized, "require_library", lambda *given: asked.append(given))
    made = make("flux", quantize="nf4")
    ((blocks, kind),) = asked
    assert kind == "nf4"
    assert list(blocks) == made.wrap_units()
    asked.clear()
    settings = {"height": 64, "width": 64, "build": "tiny"}
    for more in ({}, {"quantize": None}, {"quantize": "int8"}):
        FAMILIES["flux"].check(settings | more)
    assert asked == [("int8",)]


def test_what_a_model_config_leaves_out_is_as_the_class_says() -> None:
    found: Any = FAMILIES["sd3"](str(tiny_builds.ensure("sd3")), 32, 16)
    codec = found.codec
    assert (codec.height, codec.width, codec.frames, codec.latent_shape) == (32, 16, 1, (16, 4, 2))
    assert (found.guidance_scale, found.cfg_scale, found.adapter.lora, found.dtype) == (
        1.0, 1.0, None, torch.bfloat16,
    )  # fmt: skip
    assert (found.shift, found.grid, codec.negative_prompt) == (None, pipeline.EXPLICIT, "")
    assert (codec.max_sequence_length, codec._decoded_together) == (512, 512)
    assert (found.attention_backend, codec.offload_encoders) == ("auto", True)
    assert (codec.keeps_padding, codec.dtype) == (False, torch.bfloat16)
    assert (codec.vae_dtype, codec.vae_tiling) == (torch.float32, False)
    assert found.reference_transformer is None
    assert not found.transformer.is_gradient_checkpointing
    assert not any(module._compiled_call_impl for module in found.transformer.modules())
    assert {p.device.type for p in found.transformer.parameters()} == {"cpu"}
    embedded: Any = FAMILIES["flux"]("unused", 16, 16, build="tiny")
    assert (embedded.cfg_scale, embedded.two_forwards) == (1.0, False)


@pytest.mark.parametrize("operator", list(checkpointing._PRODUCTS), ids=str)
def test_a_product_is_kept_from_as_many_inputs_for_each_output_on(operator: Any) -> None:
    keeps = partial(checkpointing._keeps_output, 2.0, None, operator)
    batch, adds = (5,) * ("bmm" in str(operator)), "add" in str(operator)
    for inputs, kept in ((7, False), (8, True), (9, True)):
        given = [torch.zeros(*batch, 3, inputs), torch.zeros(*batch, inputs, 4)]
        given = [torch.zeros(1, 1), *given] if adds else given
        save, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
        assert keeps(*given) == (save if kept else again)


def test_a_cheap_product_is_made_again_and_one_that_closes_a_block_is_kept() -> None:
    """The figures are of the table in the module: inputs for each output."""
    product, save = torch.ops.aten.mm.default, CheckpointPolicy.MUST_SAVE
    for least, inputs in ((checkpointing.PRODUCTS_FROM, 17), (checkpointing.ATTENTION_FROM, 200)):
        for given, kept in ((inputs, True), (inputs - 1, False)):
            factors = torch.zeros(1, given), torch.zeros(given, 100)
            assert (checkpointing._keeps_output(least, None, product, *factors) == save) == kept


@pytest.mark.parametrize("operator", list(checkpointing._PRODUCTS), ids=str)
def test_factors_of_a_product_are_found_among_its_arguments(operator: Any) -> None:
    names = [argument.name for argument in operator._schema.arguments]
    first = checkpointing._PRODUCTS[operator]
    pairs = (["self", "mat2"], ["mat1", "mat2"], ["batch1", "batch2"])
    assert names[first : first + 2] in pairs


def test_an_adapter_is_merged_once_and_only_where_every_sum_is_finite() -> None:
    merged, broken = make("sd3"), make("sd3")
    own = broken.adapter.trained_parameters()
    broken.adapter.load_trained_parameters(
        {name: torch.full_like(p, torch.inf) for name, p in own.items()}
    )
    with pytest.raises(ValueError, match=r"(?i)nan|unsafe"):
        broken.adapter.merge()
    merged.adapter.merge()
    assert (merged.adapter.lora, merged.adapter.lora_layers) == (None, [])
    assert not any("lora" in name for name, _ in merged.named_parameters())


def test_a_rank_that_only_generates_holds_adapters_as_their_layers_compute() -> None:
    halved: Any = make("sd3", dtype="bfloat16").adapter
    own = halved.trained_parameters()
    wide = halved._adapted[0]
    wide.get_base_layer().weight.data = wide.get_base_layer().weight.float()
    first = {id(p) for factors in (wide.lora_A, wide.lora_B) for p in factors.parameters()}
    wanted = {name: torch.float32 if id(p) in first else torch.bfloat16 for name, p in own.items()}
    told = halved.generating_parameters()
    halved.only_generate()
    for found in (told, own):
        assert {name: p.dtype for name, p in found.items()} == wanted


def test_a_prompt_is_cut_after_the_last_token_that_a_branch_reads(policy: Any) -> None:
    one, other = torch.tensor([[1, 1, 0, 0, 0]]).bool(), torch.tensor([[1, 0, 1, 0, 0]]).bool()
    text, pooled = torch.arange(5.0).view(1, 5, 1), torch.zeros(1, 7)
    given = {"text": text, "mask": one, "pooled": pooled}
    both = {**given, "negative_text": -text, "negative_mask": other}
    found = policy.codec.trim_condition(given)
    assert found.keys() == {"text", "pooled"}, "nothing is left to be masked"
    assert torch.equal(found["text"], text[:, :2])
    assert found["pooled"] is pooled
    found = policy.codec.trim_condition(both)
    assert found.keys() == both.keys()
    assert torch.equal(found["negative_text"], -text[:, :3])
    assert (found["mask"].tolist(), found["negative_mask"].tolist()) == (
        [[True, True, False]], [[True, False, True]],
    )  # fmt: skip
    nothing = {"text": text, "mask": one & ~one}
    assert policy.codec.trim_condition(nothing)["text"].shape == (1, 0, 1)
    two = {name: value.repeat(2, *[1] * (value.dim() - 1)) for name, value in given.items()}
    without = {"text": text}
    assert policy.codec.trim_condition(two) is two
    assert policy.codec.trim_condition(without) is without
    policy.keep_padding(True)
    assert policy.codec.trim_condition(given) is given
    policy.keep_padding(False)


class Encoder(nn.Module):
    """Notes where it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[str] = []

    def to(self, where: Any) -> Encoder:  # type: ignore[override]
        self.moved.append(str(where))
        return self


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_encoders_are_on_the_device_while_they_encode(
    monkeypatch: pytest.MonkeyPatch, offload: bool, reads: bool
) -> None:
    policy: Any = make("sd3", offload_encoders=offload)
    encoder, vae = Encoder(), Encoder()
    vars(policy.codec)["_pipeline"] = SimpleNamespace(components={"a": encoder, "tokenizer": None})
    vars(policy.codec)["_vae"] = vae
    monkeypatch.setattr(type(policy.codec), "reads", {"image": (1, 1)} if reads else {})

    def encode_text(pipeline: Any, text: str) -> dict[str, Tensor]:
        assert pipeline.components["a"].moved == ["cpu"], "the device of the network"
        length = torch.full((1, 2), float(len(text)), dtype=torch.float64)
        return {"text": length, "mask": length > 1, "ids": length.long()}

    policy.codec.encode_text = encode_text
    found = policy.codec.encode_prompts([Wording("a"), Wording("bb")])
    assert encoder.moved == ["cpu"] * (1 + offload)
    assert vae.moved == encoder.moved * reads
    assert found["text"].tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert [value.dtype for value in found.values()] == [torch.float32, torch.bool, torch.int64]
    policy.codec.release_encoders()
    assert not {"_pipeline", "_vae"} & vars(policy.codec).keys()
    emptied: list[int] = []
    for devices in (0, 1):
        monkeypatch.setattr(
            pipeline_codec.accelerator, "device_count", lambda devices=devices: devices
        )
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(1))
        policy.codec.release_encoders()
        assert len(emptied) == devices


def test_parts_are_read_frozen_from_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    kind = getattr(diffusers, FAMILIES["sd3"].pipelines[0])
    load = kind.from_pretrained

    def watched(*args: Any, **options: Any) -> Any:
        asked.append(options)
        return load(*args, **options)

    monkeypatch.setattr(kind, "from_pretrained", watched)
    folder = shutil.copytree(tiny_builds.ensure("sd3"), tmp_path / "sd3")
    policy: Any = make("sd3", path=str(folder), build="real", vae_tiling=True)
    diffusers.utils.logging.enable_progress_bar()
    assert policy.codec.encode([Prompt("a star")])["text"].dtype == policy.dtype
    assert not diffusers.utils.logging.is_progress_bar_enabled(), "many ranks share a terminal"
    (options,) = asked
    assert options["local_files_only"]
    assert [name for name, part in options.items() if part is None] == [
        "transformer", "vae", "scheduler",
    ]  # fmt: skip
    said = logging.getLogger(type(policy.codec._pipeline).__module__)
    assert not said.isEnabledFor(logging.WARNING), "it would tell of every prompt that it cuts"
    assert policy.codec._vae.use_tiling
    assert not any(p.requires_grad for p in policy.codec._vae.parameters())
    index = {"weight_map": {"a": "model-00002-of-00002.safetensors"}}
    (folder / "text_encoder_2" / "model.safetensors.index.json").write_text(json.dumps(index))
    policy.codec.release_encoders()
    with pytest.raises(
        PretrainedError, match=r"no text_encoder_2/model-00002-of-00002.safetensors"
    ):
        policy.codec.encode([Prompt("a ring")])


class Own(pipeline.DiffusersPolicy):
    """Two lists of blocks in each of two networks."""

    family = "own"
    block_lists = ("blocks", "single_blocks")
    components = {"transformer": "", "other": "other."}  # noqa: RUF012
    attention, feed_forward = ("q", "k"), ("up",)
    single_attention, single_feed_forward = ("s", "t"), ("down",)
    unread = frozenset({"k", "s", "up"})


def test_presets_name_the_layers_of_every_block_but_what_the_last_one_does_not_read() -> None:
    one = SimpleNamespace(num_layers=2)
    first, last = ["blocks.0.q", "blocks.0.k"], ["blocks.1.q"]
    assert Own.lora_names(one, "attention") == [
        *first, *last, *(f"other.{name}" for name in (*first, *last)),
    ]  # fmt: skip
    whole = Own.lora_names(SimpleNamespace(num_layers=1, num_single_layers=2), "attention_ff")
    assert whole[: len(whole) // 2] == [
        "blocks.0.q", "single_blocks.0.s", "single_blocks.0.t", "single_blocks.0.down",
        "single_blocks.1.t", "single_blocks.1.down",
    ]  # fmt: skip


def test_a_prompt_that_is_cut_is_told_and_one_that_just_fits_is_not(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(policy.codec, "say_once", lambda topic, message: said.append(message))

    def tokenizer(text: str, truncation: bool, verbose: bool) -> Any:
        assert not truncation, "it would never be too long"
        assert not verbose, "it would tell of it by itself"
        return SimpleNamespace(input_ids=text.split())

    policy.codec.report_long_prompt(tokenizer, "a b c", 3)
    assert not said
    policy.codec.report_long_prompt(tokenizer, "a b c d", 3)
    (message,) = said
    assert "takes 3 tokens" in message
    assert "4 tokens" in message


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
    run = partial(checkpointing._run_block, modes, lambda *args: ("off", *args))
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
        assert (keeps.func, keeps.args) == (checkpointing._keeps_output, (limit,))


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
    found = checkpointing._keeps_output(9.0, None, operator)
    assert (found == CheckpointPolicy.MUST_SAVE) == kept


def test_nothing_is_switched_on_where_every_block_keeps_everything() -> None:
    enabled: list[Any] = []
    transformer = SimpleNamespace(enable_gradient_checkpointing=enabled.append)
    blocks = [nn.Linear(1, 1), nn.Linear(1, 1)]
    for given, count in ((False, 0), (True, 1), (0.5, 1)):
        enabled.clear()
        checkpointing.enable_recompute(transformer, blocks, recompute.parse_recompute(given))
        assert len(enabled) == count
    modes, offload = enabled[0].args
    assert list(modes) == blocks
    assert sorted(modes.values()) == sorted([recompute.ALL, recompute.INPUTS])
    assert offload is None
