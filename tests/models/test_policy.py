"""What every policy does with its network, by a linear one whose answers are computed by hand."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from digenrl.models import codec
from digenrl.models import policy as module
from digenrl.models.codec import Codec
from digenrl.models.guidance import NEGATIVE, Guidance
from digenrl.models.lora import LoraSpec
from digenrl.models.policy import Policy
from digenrl.models.wording import Wording
from digenrl.recompute import parse_recompute
from digenrl.types import Prompt


class Network(nn.Module):
    """A network with a matrix product in a block, and a norm outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3, bias=False)])
        self.norm = nn.LayerNorm(3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.blocks[0](rows) + self.norm.bias


class PlainCodec(Codec):
    """A text is encoded as its length, and latents are media."""

    def __init__(self, network: nn.Module, guidance: Guidance) -> None:
        super().__init__("plain", network, (2, 3), guidance)
        self.encoded: list[list[str]] = []

    def encode_prompts(self, wordings: Sequence[Any]) -> dict[str, Tensor]:
        self.encoded.append([each.text for each in wordings])
        return {"text": torch.tensor([[float(len(each.text))] for each in wordings])}

    def decode(self, latents: Tensor) -> Tensor:
        return latents


class Plain(Policy):
    """The velocity is W x + sigma + the text's length."""

    family, codec_class, block_lists = "plain", PlainCodec, ("blocks",)
    codec: PlainCodec

    def __init__(
        self,
        network: nn.Module | None = None,
        guidance_scale: float = 1.0,
        cfg: bool = False,
        **options: Any,
    ) -> None:
        network = network or Network()
        codec = PlainCodec(network, Guidance(guidance_scale, cfg))
        super().__init__(network, codec, **options)
        self.asked: list[tuple[int, list[float], list[float]]] = []
        self.cast: list[tuple[bool, bool]] = []
        self.adds = True

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        text = condition["text"]
        self.cast.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        self.asked.append((len(latents), sigmas.tolist(), text.flatten().tolist()))
        out = self.network(latents) + sigmas.view(-1, 1, 1) + text.view(-1, 1, 1)
        return out if self.adds else out[:, :1]

    def sigma_grid(self, steps: int) -> Tensor:
        return torch.linspace(1, 0, steps + 1)


LATENTS = torch.arange(12.0).view(2, 2, 3) / 10
SIGMAS = torch.tensor([0.5, 0.25])


def conditions() -> dict[str, Tensor]:
    texts = {"text": torch.tensor([[4.0], [8.0]]), NEGATIVE + "text": torch.tensor([[1.0], [2.0]])}
    return texts


def branch(policy: Plain, text: Tensor) -> Tensor:
    weight = policy.transformer.blocks[0].weight  # type: ignore[union-attr, index]
    return LATENTS @ weight.t() + SIGMAS.view(-1, 1, 1) + text.view(-1, 1, 1)


def test_one_forward_serves_where_nothing_is_guided() -> None:
    for options in (
        {},
        {"guidance_scale": 3.0},
        {"cfg": True},
        {"cfg": True, "guidance_scale": 0.5},
    ):
        policy = Plain(**options)
        assert not policy.two_forwards
        found = policy.velocity(LATENTS, SIGMAS, conditions())
        assert policy.asked == [(2, [0.5, 0.25], [4.0, 8.0])]
        torch.testing.assert_close(found, branch(policy, conditions()["text"]))


@pytest.mark.parametrize("detached", [False, True])
def test_guidance_goes_from_the_unconditional_branch_beyond_the_conditional_one(
    detached: bool,
) -> None:
    policy = Plain(cfg=True, guidance_scale=3.0)
    policy.detach_unconditional = detached
    found = policy.velocity(LATENTS, SIGMAS, conditions())
    both = (4, [0.5, 0.25] * 2, [1.0, 2.0, 4.0, 8.0])
    apart = [(2, [0.5, 0.25], [1.0, 2.0]), (2, [0.5, 0.25], [4.0, 8.0])]
    assert policy.asked == (apart if detached else [both])
    one, other = (branch(policy, conditions()[name]) for name in (NEGATIVE + "text", "text"))
    torch.testing.assert_close(found, one + 3.0 * (other - one))
    again = [0, 1, 0]
    rows = {name: value[again] for name, value in conditions().items()}
    torch.testing.assert_close(policy.velocity(LATENTS[again], SIGMAS[again], rows), found[again])
    found.sum().backward()
    weight = policy.transformer.blocks[0].weight  # type: ignore[union-attr, index]
    # W is in both branches: u + 3 (c - u) has its gradient once, and 3 times if u is a constant.
    wanted = LATENTS.sum((0, 1)).expand(3, 3) * (3.0 if detached else 1.0)
    torch.testing.assert_close(weight.grad, wanted)
    with pytest.raises(ValueError, match=r"needs condition\['negative_text'\], got \['text'\]"):
        policy.velocity(LATENTS, SIGMAS, {"text": conditions()["text"]})


def test_a_velocity_of_another_shape_is_refused() -> None:
    policy = Plain()
    policy.adds = False
    with pytest.raises(ValueError, match=r"gave \[2, 1, 3\] for latents \[2, 2, 3\]"):
        policy.velocity(LATENTS, SIGMAS, conditions())


def test_the_scale_may_be_another_for_a_while() -> None:
    policy, plain = Plain(cfg=True, guidance_scale=3.0), Plain(guidance_scale=3.0)
    assert (plain.guidance_scale, plain.cfg_scale) == (3.0, 1.0)
    with policy.guided_by(5.0):
        assert (policy.guidance_scale, policy.cfg_scale) == (5.0, 5.0)
        with policy.guided_by(None):
            assert policy.cfg_scale == 5.0
    assert (policy.guidance_scale, policy.cfg_scale) == (3.0, 3.0)
    with plain.guided_by(3.0):
        assert plain.cfg_scale == 1.0
    with pytest.raises(ValueError, match="has no unconditional branch"), plain.guided_by(2.0):
        pass
    plain.embedded_guidance = True  # type: ignore[misc]
    with plain.guided_by(2.0):
        assert (plain.guidance_scale, plain.cfg_scale) == (2.0, 1.0)


def test_a_text_is_encoded_once_and_the_least_recently_used_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "CACHED_TEXTS", 2)
    policy = Plain()

    def encode(*texts: str) -> list[float]:
        return policy.codec.encode([Prompt(text) for text in texts])["text"].flatten().tolist()

    assert encode("a", "bb", "a") == [1.0, 2.0, 1.0]
    assert policy.codec.encoded == [["a", "bb"]]
    assert encode("a") == [1.0]
    assert encode("ccc") == [3.0]  # forgets bb
    assert encode("a", "ccc") == [1.0, 3.0]
    assert policy.codec.encoded == [["a", "bb"], ["ccc"]]
    assert encode("bb") == [2.0]  # forgets a
    assert encode("ccc", "a") == [3.0, 1.0]
    assert policy.codec.encoded[2:] == [["bb"], ["a"]]
    assert len(policy.codec._embeddings) == 2


def test_what_a_store_has_is_not_encoded() -> None:
    policy = Plain()
    stored = {"a": torch.tensor([[7.0]])}

    class Store:
        def read_condition(self, wording: Any) -> Any:
            return {"text": stored[wording.text]} if wording.text in stored else None

    policy.codec.store = Store()  # type: ignore[assignment]
    assert policy.codec.encode([Prompt("a"), Prompt("bb")])["text"].tolist() == [[7.0], [2.0]]
    assert policy.codec.encoded == [["bb"]]


def test_the_negative_text_is_the_prompts_else_the_familys(caplog: Any) -> None:
    policy = Plain(cfg=True, guidance_scale=2.0)
    prompts = [Prompt("a", negative="xyz"), Prompt("bb", negative="")]
    found = policy.codec.encode(prompts)
    assert policy.codec.encoded == [["a", "bb", "xyz", ""]]
    assert found["text"].tolist() == [[1.0], [2.0]]
    assert found[NEGATIVE + "text"].tolist() == [[3.0], [0.0]]
    with pytest.raises(ValueError, match="'ccc' has none"):
        policy.codec.encode([Prompt("ccc")])
    policy.codec.default_negative = lambda: "four"  # type: ignore[method-assign]
    assert policy.codec.encode([Prompt("ccc")])[NEGATIVE + "text"].tolist() == [[4.0]]
    plain = Plain()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert plain.codec.encode(prompts).keys() == {"text"}
        plain.codec.encode([Prompt("a")])
    said = [record.message for record in caplog.records if "negative" in record.message]
    assert len(said) == 1, "once"


def test_images_that_nobody_reads_are_told_once_and_those_that_are_read_are_counted(
    caplog: Any,
) -> None:
    image: Any = SimpleNamespace(role="image")
    other: Any = SimpleNamespace(role="mask")
    policy = Plain()
    with caplog.at_level(logging.WARNING):
        policy.codec.encode([Prompt("a", images=(other,))])
        assert not caplog.records
        for _ in range(2):
            policy.codec.encode([Prompt("a", images=(image,))])
    assert [record.message for record in caplog.records] == [
        "images of prompts are ignored: plain reads none"
    ]

    class Reads(PlainCodec):
        reads = {"image": (1, 2)}  # noqa: RUF012

    class One(PlainCodec):
        reads = {"image": (1, 1)}  # noqa: RUF012

    for kind, count, said in (
        (Reads, 0, "takes 1 to 2 images of role image, the prompt has 0"), (Reads, 1, None),
        (Reads, 2, None), (Reads, 3, "the prompt has 3"), (One, 1, None),
        (One, 2, "takes 1 images of role image"),
    ):  # fmt: skip
        prompt = Prompt("a", images=(other, *[image] * count))
        made = kind(Network(), Guidance())
        if said is None:
            kind.check_prompt(prompt, "plain")
            ((wording,), none) = made.branch_wordings([prompt])
            assert (wording.images, none) == ((image,) * count, [])
        else:
            with pytest.raises(ValueError, match=said):
                kind.check_prompt(prompt, "plain")
            with pytest.raises(ValueError, match=said):
                made.encode([prompt])


def test_a_wording_is_told_by_its_text_and_by_its_images() -> None:
    image: Any = SimpleNamespace(role="image", digest="d1")
    assert Wording("a").key == "a"
    assert Wording("a", (image,)).key == ["a", ["image", "d1"]]


def test_all_weights_have_a_frozen_copy_for_reference_if_asked() -> None:
    with (
        pytest.raises(RuntimeError, match=r"set model\.keep_reference=true"),
        Plain().adapter.reference(),
    ):
        pass
    policy = Plain(keep_reference=True)
    copy: Any = policy.reference_transformer
    assert policy.adapter.has_reference
    assert not Plain().adapter.has_reference
    assert policy.all_networks() == [policy.transformer, copy]
    assert policy.wrap_units() == [policy.transformer.blocks[0], copy.blocks[0]]  # type: ignore[index, union-attr]
    assert not any(p.requires_grad for p in copy.parameters())
    with policy.adapter.reference():
        with policy.adapter.reference():
            assert policy.network is copy
        assert policy.network is copy
    assert policy.network is policy.transformer
    assert len(policy.adapter.trained_parameters()) == 3
    assert len(Plain(Network().requires_grad_(False)).adapter.trained_parameters()) == 3, (
        "all of them"
    )


def test_trained_parameters_are_taken_whole_or_not_at_all() -> None:
    policy = Plain()
    own = policy.adapter.trained_parameters()
    new = {name: torch.full_like(p, 2.0) for name, p in own.items()}
    policy.adapter.load_trained_parameters(new)
    assert all((p == 2.0).all() for p in own.values())
    first = next(iter(own))
    with pytest.raises(ValueError, match=r"1 unknown \['more'\], 1 missing"):
        policy.adapter.load_trained_parameters({"more": new[first], **dict(list(new.items())[1:])})
    with pytest.raises(ValueError, match=r"1 unknown \['more'\], 0 missing"):
        policy.adapter.load_trained_parameters({"more": new[first], **new})
    with pytest.raises(ValueError, match=r"0 unknown \[\], 1 missing"):
        policy.adapter.load_trained_parameters(dict(list(new.items())[1:]))
    with pytest.raises(ValueError, match="has shape"):
        policy.adapter.load_trained_parameters(new | {first: torch.zeros(1)})
    assert policy.adapter.parameters_without_gradient() == list(own)
    own[first].grad = torch.zeros_like(own[first])
    assert policy.adapter.parameters_without_gradient() == list(own)[1:]


def test_a_rank_that_only_generates_holds_what_autocast_would_make_of_it() -> None:
    policy = Plain(dtype="bfloat16")
    wanted = {
        "blocks.0.weight": torch.bfloat16,
        "norm.weight": torch.float32,
        "norm.bias": torch.float32,
    }
    told = policy.adapter.generating_parameters()
    assert {name: each.dtype for name, each in told.items()} == wanted
    assert {each.device.type for each in told.values()} == {"meta"}
    own = policy.adapter.trained_parameters()
    assert {name: each.shape for name, each in told.items()} == {n: p.shape for n, p in own.items()}
    assert {p.dtype for p in own.values()} == {torch.float32}
    before = policy.velocity(LATENTS, SIGMAS, conditions())
    policy.adapter.only_generate()
    assert {name: p.dtype for name, p in own.items()} == wanted
    assert torch.equal(policy.velocity(LATENTS, SIGMAS, conditions()), before)
    assert before.dtype == torch.float32


def test_autocast_is_for_all_weights_in_half_precision_and_keeps_no_second_copy() -> None:
    cached = torch.is_autocast_cache_enabled()
    for dtype, adapted, wanted in (
        ("bfloat16", False, (True, False)),
        ("float32", False, (False, cached)),
        ("bfloat16", True, (False, cached)),
    ):
        policy = Plain(dtype=dtype)
        if adapted:
            policy.adapter.only_generate()
            policy.adapter.lora = LoraSpec(1, 1.0, ("a",))
        policy.velocity(LATENTS, SIGMAS, conditions())
        assert policy.cast == [wanted]


def test_blocks_are_recomputed_in_the_trained_network_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        module.checkpointing, "enable_recompute", lambda *given: asked.append(given)
    )
    policy = Plain(keep_reference=True, gradient_checkpointing="products")
    own = list(policy.transformer.blocks)  # type: ignore[arg-type]
    assert asked == [(policy.transformer, own, parse_recompute("products"))]


def test_a_part_of_a_sample_may_be_drawn() -> None:
    policy = Plain()
    assert policy.drawn_shape == (2, 3)
    assert not policy.own_levels
    assert not policy.detach_unconditional
    policy.drawn = 1
    assert policy.drawn_shape == (1, 3)
    assert policy.to_device(LATENTS).device == policy.device == torch.device("cpu")
    with pytest.raises(ValueError, match="has no `encode_media`"):
        policy.codec.encode_media([])
    assert (policy.attention_used(policy.device), policy.codec.default_negative()) == ({}, None)
