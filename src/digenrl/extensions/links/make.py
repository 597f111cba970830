"""Make a rank's link in an installation with this extension."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from digenrl.cluster.control import Control
from digenrl.cluster.world import Session, World
from digenrl.extensions.links.broadcast import Audience, BroadcastLink
from digenrl.extensions.links.settings import broadcasts
from digenrl.record.run_dir import append_event
from digenrl.transport.link import LinkMaker, SocketLink, socket_link


def link_maker(config: Any, given: Mapping[str, Any]) -> LinkMaker:
    """Return the function that makes each rank's link in a run with this configuration.

    Args:
        given: arguments of `SocketLink` that an emulated run has of its own.
    """

    def make(control: Control, world: World, session: Session, device: torch.device) -> SocketLink:
        kind: Any = SocketLink
        audience = (0, *world.rollout_ranks)
        if world.rank in audience and broadcasts(config, world.rollouts):
            tell = partial(append_event, session.run_dir)
            kind = partial(BroadcastLink, Audience(audience, control.store, device, tell))
        return socket_link(control, world, session, device, kind, **given)

    return make
