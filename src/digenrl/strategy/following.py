"""Rollouts that generate together: the first of a group leads, the others follow.

    leader     claims, draws noise, takes the denoising steps, decodes, scores, sends; before each forward it tells
    followers  latents, noise levels, conditioning, guidance, version, and whether the base model's is meant; then all
               compute the forward together

A follower keeps nothing of a task, so that what may happen to one (hand-off, scouts, evaluation) is the leader's alone.
Weights come to every rank of a group as they come to all rollouts. A forward names the version that it needs, and a
follower adopts that first, or has it in use for as long as an evaluation of other weights lasts: a group computes with
one version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor

from digenrl.cluster.control import Control
from digenrl.diffusion.denoise import expand_condition
from digenrl.models.policy import Policy
from digenrl.record.span_log import SpanLog
from digenrl.strategy.evaluating import number_of_evaluated
from digenrl.transport.link import Link
from digenrl.transport.weights import Arrivals, Version, adopt, exchanged
from digenrl.transport.wire import Kind, Message

_OWN = ("latents", "sigmas")
_POLL_S = 0.2
"""Longest wait for a message before a follower looks whether the run has been aborted."""


@contextmanager
def leading(policy: Policy, link: Link, followers: Sequence[int], version: Callable[[], int]) -> Iterator[None]:
    """Inside, `followers` compute every forward of `policy` too; afterwards they are done.

    Args:
        version: of the weights in use (`number_of_evaluated` of those that an evaluation is of).
    """

    def tell(latents: Tensor, sigmas: Tensor, condition: dict[str, Tensor]) -> None:
        once = {name: value[:1] if value.stride(0) == 0 else value for name, value in condition.items()}
        tensors = {"latents": latents, "sigmas": sigmas, **once}
        for rank in followers:
            facts = {"version": version(), "guidance": policy.guidance_scale, "reference": policy.in_reference}
            link.send(rank, Message(Kind.FORWARD, facts, tensors))

    policy.before_velocity = tell if followers else None
    yield
    for rank in followers:
        link.send(rank, Message(Kind.FORWARD, {}))


class Follower:
    """The life of a rollout that follows: compute what the leader tells, until there is nothing more."""

    def __init__(self, policy: Policy, control: Control, link: Link, spans: SpanLog) -> None:
        self._policy, self._control, self._link, self._spans = policy, control, link, spans
        self._parameters = policy.trained_parameters()
        self._arrivals = Arrivals(self._parameters)
        self._weights: dict[int, Version] = {}
        self._version: int | None = None
        """In use."""
        self._adopted: int | None = None
        self._examined = ExitStack()
        """Ends the use of an evaluation's weights."""

    @torch.no_grad()
    def run(self) -> None:
        """Until the leader is done.

        Raises:
            Aborted: the run was aborted.
        """
        with self._spans.stage("generate"):
            while (forward := self._next()).tensors:
                self._hold(int(forward.meta["version"]))
                with self._spans.span("generate", quiet=True, version=self._version):
                    given = {name: value.to(self._policy.device) for name, value in forward.tensors.items()}
                    latents, sigmas = (given.pop(name) for name in _OWN)
                    base = self._policy.reference() if forward.meta["reference"] else nullcontext()
                    with self._policy.guided(float(forward.meta["guidance"])), base:
                        self._policy.velocity(latents, sigmas, expand_condition(given, len(latents)))

    def _next(self) -> Message:
        """What the leader tells next, as soon as the weights that it needs are here."""
        told: Message | None = None
        with self._spans.span("wait", quiet=True, cause="straggler"):
            while told is None or told.meta.get("version", self._version) not in (
                self._version,
                self._adopted,
                *self._weights,
            ):
                self._control.check()
                message = self._link.receive(_POLL_S)
                if message is not None and message.kind is Kind.FORWARD:
                    told = message
                elif message is not None and (version := self._arrivals.add(message)) is not None:
                    self._weights[version.number] = version
        return told

    def _hold(self, version: int) -> None:
        """Take a version into use."""
        if version == self._version:
            return
        self._examined.close()
        self._version = version
        if version < 0:
            self._examined.enter_context(exchanged(self._parameters, self._weights[version]))
        elif version != self._adopted:
            weights, self._adopted = self._weights.pop(version), version
            with self._spans.span("adopt", version=version, digest=weights.digest):
                adopt(self._parameters, weights)
            for old in [number for number in self._weights if max(number, number_of_evaluated(number)) < version]:
                del self._weights[old]
