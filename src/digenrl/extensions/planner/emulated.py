"""A policy whose network sleeps as long as a hardware profile says that the real network would
compute.

Processes, store, transfers and optimizer steps are real, on small tensors. So 16 to 48 ranks are
measured on a two-core machine.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from digenrl.extensions.planner.durations import Durations
from digenrl.models.codec import Codec
from digenrl.models.guidance import Guidance
from digenrl.models.policy import Policy
from digenrl.models.wording import Wording
from digenrl.transport.link import PeerLine
from digenrl.transport.wire import Message, MessageKind

LATENT = (16, 4)
"""Shape [N, C] of the stand-in latents."""


class EmulatedLine(PeerLine):
    """A line that takes as long for small tensors as a real line for the real ones.

    Args:
        fetch: seconds of a version.
        send: seconds of a task.
    """

    def __init__(self, fetch: float, send: float) -> None:
        self._fetch, self._send = fetch, send

    def prepare_outgoing(self, message: Message) -> Message:
        """Wait while a task, finished or suspended, would be on its way."""
        time.sleep(self._send if message.kind in (MessageKind.CELLS, MessageKind.STATE) else 0.0)
        return message

    def accept_incoming(self, message: Message, sock: socket.socket) -> Message:
        """Wait at the end of a version while its buckets would be on their way."""
        time.sleep(
            self._fetch if message.kind is MessageKind.WEIGHTS and not message.tensors else 0.0
        )
        return message


class _Sleep(torch.autograd.Function):
    """Identity that sleeps in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_s: float, backward_s: float) -> Tensor:
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class EmulatedCodec(Codec):
    """Encoders and decoder that sleep.

    Args:
        network: see `Codec`.
        durations: seconds of each kind of work on this rank.
    """

    def __init__(self, network: nn.Module, durations: Durations) -> None:
        super().__init__("emulated", network, LATENT, Guidance())
        self._durations = durations

    def encode_prompts(self, wordings: Sequence[Wording]) -> dict[str, Tensor]:
        time.sleep(self._durations.encode * len(wordings))
        return {"text": torch.zeros(len(wordings), 1)}

    def decode(self, latents: Tensor) -> Tensor:
        time.sleep(self._durations.decode * latents.shape[0] / self._durations.task_size)
        return latents.float().reshape(-1, 1, 8, 8).sigmoid().repeat(1, 3, 1, 1)


class EmulatedPolicy(Policy):
    """Policy that sleeps instead of computing. A trained cell's time is one third forward and two
    thirds backward.

    Args:
        durations: seconds of each kind of work on this rank.
        adapter: whether only a part of the weights is trained, as with LoRA.
    """

    family = "emulated"
    codec_class = EmulatedCodec
    block_lists = ()

    def __init__(self, durations: Durations, adapter: bool) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            transformer = nn.Linear(LATENT[1], LATENT[1])
        codec = EmulatedCodec(transformer, durations)
        super().__init__(transformer, codec, keep_reference=True)
        transformer.bias.requires_grad_(not adapter)
        self._durations = durations

    def predict(self, latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> Tensor:
        velocity: Tensor = self.network(latents)
        share = latents.shape[0] / self._durations.task_size
        if torch.is_grad_enabled():
            seconds = self._durations.cell * share
            return _Sleep.apply(velocity, seconds / 3, 2 * seconds / 3)
        if self.network is self.transformer:  # a trained cell's time includes its reference forward
            time.sleep(self._durations.step * share)
        return velocity

    def sigma_grid(self, steps: int) -> Tensor:
        return torch.linspace(1.0, 0.0, steps + 1)
