"""Make a rank's link in an installation with this extension."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from digenrl.cluster.control import Control
from digenrl.cluster.world import Session, World
from digenrl.extensions.links.broadcast import Audience, BroadcastLink
from digenrl.extensions.links.settings import broadcasts
from digenrl.extensions.links.thin import ThinLine, ThinSettings, said_mb_s
from digenrl.record.run_dir import append_event
from digenrl.transport.link import Lines, LinkMaker, SocketLink, socket_link


def link_maker(config: Any, lines: Lines | None = None) -> LinkMaker:
    """Return the function that makes each rank's link in a run with this configuration.

    Args:
        lines: lines between ranks in place of `ThinLine`; an emulated run has its own.
    """

    def make(control: Control, world: World, session: Session, device: torch.device) -> SocketLink:
        asked = config.network
        settings = ThinSettings(asked.delta, asked.compress, asked.whole_every, asked.thin_mb_s)
        said = said_mb_s(config.hardware, world.trainers, world.rollouts, world.rank)

        def line(peer: int) -> ThinLine:
            return ThinLine(settings, said[min(peer, len(said) - 1)] if said else math.inf)

        audience = (0, *world.rollout_ranks)
        changes: dict[str, Any] = {"lines": lines or line}
        if world.rank in audience and broadcasts(config, world.rollouts):
            tell = partial(append_event, session.run_dir)
            changes["kind"] = partial(
                BroadcastLink, Audience(audience, control.store, device, tell)
            )
        return socket_link(control, world, session, device, **changes)

    return make
