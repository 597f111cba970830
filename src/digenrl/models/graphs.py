"""CUDA graphs of forwards without gradient: recorded once for each shape, then replayed with new values.

A denoising step launches thousands of kernels, which takes the processor longer than a GPU needs for a small picture. A
graph launches all of them at once. They are the kernels of the same forward without a graph, on rollouts and on
trainers, whose forwards with gradients stay as they are: ratios are what they are without graphs.

A graph reads its inputs, and the weights, from the places that they had: weights may change their values, never their
place. Plain numbers (guidance scales) are part of it, so that others have a graph of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

MOST = 16
"""Graphs of a policy; further shapes run without."""
_WARM_UP = 3
"""Forwards before recording: what is made once (handles, tuning, compiled code) is not recorded."""


class Recorded:
    """`call(*inputs)` as a CUDA graph in the memory of `pool`.

    Raises:
        RuntimeError: the call waits for the processor (`.item()`, a copy from memory that is not pinned).
    """

    def __init__(self, pool: Any, call: Callable[..., Tensor], *inputs: Any) -> None:
        self._inputs = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, inputs)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                call(*self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads (scorers, links) may use the GPU meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._output = call(*self._inputs)

    def __call__(self, *inputs: Any) -> Tensor:
        """The call's value for `inputs`, shaped as those of the recording."""
        tree_map(lambda place, new: place.copy_(new) if isinstance(place, Tensor) else None, self._inputs, inputs)
        self._graph.replay()
        return self._output.clone()


class Graphs:
    """The graphs of one policy.

    They share their memory, because none is needed after its replay: the largest forward's, beside the weights.

    Args:
        record: makes a graph of a call and its inputs; None: CUDA.
        device: kind of device that has graphs.
    """

    def __init__(self, record: Callable[..., Callable[..., Tensor]] | None = None, device: str = "cuda") -> None:
        self._record, self._device = record or self._recorded, device
        self._pool: Any = None
        self._graphs: dict[Hashable, Callable[..., Tensor]] = {}

    def _recorded(self, call: Callable[..., Tensor], *inputs: Any) -> Recorded:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return Recorded(self._pool, call, *inputs)

    def serve(self, latents: Tensor) -> bool:
        """Whether a forward of `latents` may go through a graph now."""
        return latents.device.type == self._device and not torch.is_grad_enabled()

    def __call__(self, call: Callable[..., Tensor], facts: Hashable, *inputs: Any) -> Tensor:
        """`call(*inputs)`, by a graph of its own for each layout of `inputs` and each `facts`: whatever else it depends
        on.

        Raises:
            RuntimeError: the call cannot be recorded.
        """
        leaves, layout = tree_flatten(inputs)
        shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        key = (facts, str(layout), shapes)
        if key not in self._graphs:
            if len(self._graphs) >= MOST:
                return call(*inputs)
            try:
                self._graphs[key] = self._record(call, *inputs)
            except RuntimeError as error:
                raise RuntimeError(
                    f"model.compile = graphs: this forward cannot be recorded ({' '.join(str(error).split())[:300]}); "
                    "set model.compile=true, or false."
                ) from error
        return self._graphs[key](*inputs)
