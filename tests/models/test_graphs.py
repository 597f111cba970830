"""Recorded forwards give what plain ones give, whatever the forward depends on.

A processor has no CUDA graphs. `Traced` records as one does: the operators of a call with the plain numbers that they
were given, reading weights where they are. The GPU's own are tried in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from digenrl.extensions.tasks.digits import DigitsPolicy
from digenrl.models.graphs import MOST, Graphs
from digenrl.models.policy import Policy
from tests.models.tiny_policies import FAMILIES, make, prompt, randomise_lora

PROMPT = prompt("three")


class Traced:
    def __init__(self, call: Callable[..., Tensor], *inputs: Any) -> None:
        leaves, layout = tree_flatten(inputs)
        self._graph = make_fx(lambda *values: call(*tree_unflatten(values, layout)))(*leaves)

    def __call__(self, *inputs: Any) -> Tensor:
        found: Tensor = self._graph(*tree_leaves(inputs))
        return found


def assert_graphs_follow(policy: Policy, graphs: Graphs | None, scale: float | None = 5.0) -> None:
    """Two shapes, another guidance `scale`, the reference and new weights: each as without graphs, and different."""
    assert graphs is not None
    seen: list[Tensor] = []

    def same(rows: int, sigma: float) -> None:
        condition = policy.encode([PROMPT])
        given = {key: value.expand(rows, *value.shape[1:]) for key, value in condition.items()}
        noise = torch.randn(rows, *policy.latent_shape, generator=torch.Generator().manual_seed(rows))
        inputs = noise.to(policy.device), torch.full((rows,), sigma, device=policy.device), given
        policy.graphs = None
        plain = policy.velocity(*inputs)
        policy.graphs = graphs
        torch.testing.assert_close(policy.velocity(*inputs), plain, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(policy.velocity(*inputs), plain, rtol=1e-5, atol=1e-6)
        seen.append(plain[:1])

    with torch.no_grad():
        same(1, 0.7)
        same(2, 0.7)
        same(1, 0.3)
        recorded = len(graphs._graphs)
        if scale is not None:
            with policy.guided(scale):
                same(1, 0.7)
        with policy.reference():
            same(1, 0.7)
        for parameter in policy.trained_parameters().values():
            parameter.add_(0.05)
        same(1, 0.7)
    wanted = 2, 3 + (scale is not None)
    assert (recorded, len(graphs._graphs)) == wanted, "one for each shape, guidance and adapter, none for new weights"
    assert all(not torch.equal(one, other) for i, one in enumerate(seen) for other in seen[:i] if one is not other)
    velocity = policy.velocity(torch.randn(1, *policy.latent_shape, device=policy.device),
                               torch.ones(1, device=policy.device), policy.encode([PROMPT]))  # fmt: skip
    assert velocity.requires_grad
    assert len(graphs._graphs) == wanted[1]


@pytest.mark.slow
def test_a_recorded_forward_follows_weights_shapes_and_adapter() -> None:
    policy = DigitsPolicy(lora={"rank": 4, "alpha": 8, "targets": ["to_q", "to_v"]})
    with torch.no_grad():
        for parameter in policy.trained_parameters().values():
            parameter.normal_(std=0.1)
    assert_graphs_follow(policy, Graphs(Traced, "cpu"), scale=None)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_a_recorded_forward_follows_all_that_it_depends_on(family: str) -> None:
    policy = make(family, guidance_scale=3.0)
    randomise_lora(policy)
    assert_graphs_follow(policy, Graphs(Traced, "cpu"))


def test_beyond_so_many_shapes_forwards_run_as_they_are() -> None:
    graphs = Graphs(lambda call, *inputs: lambda *given: call(*given) + 1.0, "cpu")
    values = [float(graphs(lambda x: x.sum(), None, torch.ones(rows))) - rows for rows in range(1, MOST + 3)]
    assert values == [1.0] * MOST + [0.0] * 2


def test_what_cannot_be_recorded_or_is_no_engine_is_said() -> None:
    def refuse(call: Callable[..., Tensor], *inputs: Any) -> Callable[..., Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match=r"graphs: this forward cannot be recorded \(operation.*model.compile=true"):
        Graphs(refuse, "cpu")(torch.sum, None, torch.ones(1))
    with pytest.raises(ValueError, match=r"model\.compile=turbo: expected true, false or graphs"):
        make("sd3", compile="turbo")
    settings = {"height": 64, "width": 64, "frames": 5, "build": "tiny", "compile": "graphs"}
    with pytest.raises(ValueError, match=r"graphs: which expert of wan22 .* set model.compile=true"):
        FAMILIES["wan22"].check(settings)
