"""Publication: the weights after the last update of a logical batch become a version that rollouts
adopt.

    every trainer   tells its speed, agrees on the digest of its weights (replicas), or takes part in gathering (shards)
    trainer 0       fixes which tasks trainers begin with, notes the version, sends it once to each node, notes its digest, fixes the shares of its steps
    rollouts        adopt the version between two trajectories, if the digest matches

Trainer 0 alone holds what is sent. The order of the calls below is the order of the trainers'
collectives: changing it on some of them would let all wait for ever.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from digenrl.cluster.claims import note_version
from digenrl.cluster.control import Control
from digenrl.models.policy import Policy
from digenrl.record.run_dir import append_event
from digenrl.schedule import ScheduleSpec
from digenrl.schedule.claims import evaluation_queue
from digenrl.strategy import gradients
from digenrl.strategy.setup import RankRuntime
from digenrl.strategy.shared import Learner
from digenrl.strategy.shares import Shares
from digenrl.strategy.tasks import TaskRunner
from digenrl.transport.weights import (
    WeightsError,
    compute_digest,
    exchanged_values,
    host_copy,
    own_part,
    publish,
    take_part,
)

_SAMPLING = "sampling_adapter"
"""Key of the digest of trainer 0's adapter of `sampling.lora`."""


class PublishedCopy:
    """Copy of the published weights beside those in training, for trainers that lend between
    updates (I6).

    Each trainer copies the part of the weights that it holds: its shard, or all of them. The copy
    of an adapter lies on the device. The copy of a model whose weights are all trained waits in
    host memory, and changes places with the weights in training for each loan.
    """

    def __init__(self, policy: Policy, learner: Learner, spec: ScheduleSpec, rollouts: int) -> None:
        self._adapter, self._learner = policy.adapter, learner
        self.kept = spec.tag and rollouts > 0 and spec.updates_per_batch > 1
        self._tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def keep_published(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this trainer's part of `tensors`, which are the published version from now on."""
        if not self.kept:
            return
        if not self._tensors:  # asked late: sharding has replaced the parameters meanwhile
            trained = self._adapter.trained_parameters().items()
            own = {name: own_part(parameter) for name, parameter in trained}
            on_host = self._adapter.lora is None
            self._tensors = host_copy(own) if on_host else {n: p.clone() for n, p in own.items()}
        for name, kept in self._tensors.items():
            kept.copy_(own_part(tensors[name]))

    def in_use(self, updates_done: int) -> AbstractContextManager[None]:
        """Return a context in which the policy holds the published version; afterwards it holds its
        own weights, bit by bit (I6)."""
        if updates_done == 0:
            return self._learner.rollout_weights()
        return exchanged_values(self._adapter.trained_parameters(), self._tensors)


class Publisher:
    """A trainer's part in publications. Every trainer calls `publish_first_version`, `publish` and
    `publish_evaluated` alike.

    Args:
        runtime: of this rank; `version`, `previous` and `current` of its state change here.
        runner: opens the queue of each version, and forgets old ones.
        published: the trainers' own copy of the published weights.
    """

    def __init__(
        self, runtime: RankRuntime, runner: TaskRunner, shares: Shares, published: PublishedCopy
    ) -> None:
        setup = runtime.setup
        self._setup, self._world, self._spec = setup, setup.world, setup.spec
        self._session, self._policy = setup.session, setup.engine.policy
        self._learner, self._state = runtime.learner, runtime.state
        self._control, self._link, self._spans = runtime.control, runtime.link, runtime.spans
        self._runner, self._shares, self._published = runner, shares, published
        self._replicas = 1 if setup.sharding == "fsdp" else setup.world.trainers
        """Trainers that hold a copy of the weights each, whose digests must be equal."""

    def publish_first_version(self) -> None:
        """Publish the version that training starts from. A resumed asynchronous run needs the one
        before as well: tasks that were in flight at the checkpoint are generated again with those
        weights."""
        state, first = self._state, self._state.first_step
        state.version = first
        if self._world.rank == 0:
            self._control.set("first_step", str(first))
        if state.previous is not None and first > 0:
            self.publish(first - 1, state.previous)
        self.publish(first)

    def publish(self, version: int, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Make the present weights (or `tensors`) version `version`, and send them to every
        rollout.

        Raises:
            WeightsError: replicated trainers disagree about their weights.
        """
        state = self._state
        with self._spans.span("publish", version=version) as facts:
            self._shares.tell_speed()
            source = tensors if tensors is not None else self._learner.rollout_parameters()
            if self._setup.levelled:
                self._level_weights(source)
            like = self._policy.adapter.generating_parameters()
            agree = partial(self._agree_on_digest, version)
            if self._world.rank == 0:
                if tensors is None:  # the version before has been open since it was published
                    self._runner.open_queue(version)
                note_version(
                    self._control, version
                )  # first: who notices a loss looks for tasks of this version too
                routes = self._routes_for(version)
                # The older copy goes before the new one is made: the host may lack room for both.
                kept, state.current = state.current if self._spec.async_steps else {}, {}
                made = publish(version, source, self._link, routes, agree, like, version == 0)
                facts["digest"] = made.digest
                state.previous, state.current = kept or None, dict(made.tensors)
                append_event(
                    self._session.run_dir, "publish", {"version": version, "digest": made.digest}
                )
                self._runner.claims.forget_old_queues(version)
            # Sharded over all trainers: gathering is a collective, whose result only trainer 0
            # keeps.
            elif self._replicas == 1:
                take_part(source)
            else:
                facts["digest"] = digest = compute_digest(source, like)
                agree(digest)
            if self._world.rank != 0:
                state.previous = (
                    None  # every trainer read it from the checkpoint; trainer 0 alone publishes it
                )
            if tensors is None:  # a version before the present one is lent to nobody
                self._published.keep_published(source)
            self._shares.fix_shares(
                version
            )  # after the digest: by that collective every trainer has told its speed
        state.version = version

    def publish_evaluated(self, version: int) -> str:
        """Send rollouts the weights of the evaluation of `version`, if they differ from the
        version's own.

        Returns:
            The digest of what was sent, on trainer 0. "": rollouts hold these weights already.
        """
        source, held = self._learner.evaluated_parameters(), self._learner.rollout_parameters()
        # The same tensors: rollouts have them as version `version`.
        if all(source[name] is held[name] for name in source):
            return ""
        with self._spans.span("publish", version=version, evaluated=True) as facts:
            if self._world.rank == 0:
                like, number = (
                    self._policy.adapter.generating_parameters(),
                    evaluation_queue(version),
                )
                made = publish(
                    number, source, self._link, self._routes_for(version), lambda digest: None, like
                )
                facts["digest"] = made.digest
                return made.digest
            if self._setup.sharding != "ddp":
                take_part(source)
        return ""

    def send_to_joined(self, rank: int) -> None:
        """Send the present version to `rank`, which joined."""
        publish(
            self._state.version,
            self._state.current,
            self._link,
            {rank: ()},
            agree=lambda digest: None,
        )

    def _level_weights(self, source: Mapping[str, Tensor]) -> None:
        """Make the trained weights equal on every trainer. Published weights that are separate
        tensors are made equal too: NFT's old policy followed each trainer's own weights."""
        trained = self._policy.adapter.trained_parameters()
        other = [tensor for name, tensor in source.items() if tensor is not trained.get(name)]
        gradients.follow_first([*trained.values(), *other], self._world.trainers)

    def _agree_on_digest(self, version: int, digest: str) -> None:
        with self._session.progress.stage("wait straggler"):
            gradients.assert_equal_digests(digest, self._replicas, version)

    def _routes_for(self, version: int) -> dict[int, list[int]]:
        """Return the rollouts that get `version` from trainer 0, each with the ranks of its node
        that it relays to.

        Bytes of version 0 are not sent, so nobody waits for the addresses of rollouts that still
        load. With a launcher that watches ranks, no rank relays: a relay's death would leave others
        without weights.
        """
        if self._session.watched or version == 0:
            return {rank: [] for rank in self._control.surviving_ranks(self._world.rollout_ranks)}
        return relay_routes(self._control, self._world.rollout_ranks, self._session.host)


def relay_routes(control: Control, started: range, own_host: str) -> dict[int, list[int]]:
    """Return the rollouts that get a version from trainer 0, each with the ranks of its node that
    it relays to. Ranks on trainer 0's own node get it from trainer 0.

    A rank that joined gets everything by one connection, hence in order: it may get the version
    that it asked for and the next one at once.

    Args:
        started: rollouts that the run began with.
    """
    routes, first = dict[int, list[int]](), dict[str, int]()
    for rank in control.surviving_ranks(started):
        host = control.wait_for(f"address/{rank}", f"address of rank {rank}").rpartition(":")[0]
        if rank in started and host != own_host and host in first:
            routes[first[host]].append(rank)
        else:
            first[host], routes[rank] = rank, []
    return routes


def agree_on_sampling_adapter(control: Control, rank: int, digest: str | None) -> None:
    """Compare this rank's adapter of `sampling.lora` with trainer 0's, by digest. The adapter is
    read from the file by every rank and never sent; None: there is none.

    Raises:
        WeightsError: the ranks read different files.
    """
    if digest is None:
        return
    if rank == 0:
        control.set(_SAMPLING, digest)
    if (first := control.wait_for(_SAMPLING, "trainer 0 to read sampling.lora")) != digest:
        raise WeightsError(
            f"sampling.lora: this rank read an adapter of digest {digest}, trainer 0 one of "
            f"{first}; give all machines the same file."
        )
