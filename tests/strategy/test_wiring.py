"""The parts of a rank: each is built of what the run chose, and knows the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from digenrl.cluster.world import World
from digenrl.record.decisions import DecisionLog
from digenrl.schedule import place_fragment
from digenrl.schedule.ranks import Roles
from digenrl.schedule.scheduler import record_header
from digenrl.strategy.checkpoint_io import DirectoryCheckpointIO
from digenrl.strategy.wiring import wire_parts
from digenrl.transport.wire import Message, MessageKind
from tests.cluster.test_claims import Store
from tests.strategy.test_lending import store
from tests.strategy.test_publishing import ASYNC, Publishing

__all__ = ["store"]


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_every_part_of_a_rank_is_built_of_what_the_run_chose(
    store: Store, tmp_path: Path, measured: bool, sharding: str
) -> None:
    spec = replace(ASYNC, updates_per_batch=2, measured_shares=measured)
    made = Publishing(store, tmp_path, spec, Roles(2, 1))
    hooks: Any = made
    hooks.place_timesteps = lambda fragment, step: place_fragment(spec, 2, fragment)
    expected = {("generate", 2): 7.0, ("train", 1): 3.0}
    setup = replace(made.runtime.setup, sharding=sharding, expected=expected, split_claims=True)
    runtime = replace(made.runtime, setup=setup)
    io, savers = DirectoryCheckpointIO(), cast(Any, object())
    parts = wire_parts(runtime, io, savers)
    runner, lockstep = parts.runner, sharding == "fsdp"
    assert runner.scheduler.roles == Roles(2, 1, lockstep, True)
    assert runner.scheduler._costs["generate", 2] == 7.0
    assert runner.scheduler._costs["train", 1] == 3.0
    assert runner._task_seconds == 0.0
    assert parts.ledger._spec is spec
    assert parts.ledger._run_dir == setup.session.run_dir
    assert parts.ledger._scheduler is runner.scheduler
    shares = parts.shares
    assert (shares._spec, shares._world) == (spec, setup.world)
    assert shares._timed == (measured and not lockstep)
    if not measured:
        assert shares.spec_at(0) is spec
    assert parts.stop_vote._sharded == lockstep
    runtime.state.updates_done = 0
    assert parts.stop_vote._droppable()
    runtime.state.updates_done = 1
    assert not parts.stop_vote._droppable(), "all weights are trained"
    assert set(parts.inbox._handlers) == {MessageKind.ASK, MessageKind.EVALUATION}
    served: list[int] = []
    parts.publisher.send_to_joined = served.append  # type: ignore[method-assign]
    parts.inbox._handlers[MessageKind.ASK](Message(MessageKind.ASK, {"rank": 5}))
    assert served == [5]
    assert (parts.checkpoints._io, parts.checkpoints._group) == (io, savers)
    assert parts.checkpoints._policy is setup.engine.policy
    assert parts.agreement._control is parts.stop_vote._control is runtime.control
    assert parts.inbox._link is runtime.link
    assert len(parts.step) == 2 * setup.micro_batches_per_update
    assert parts.inbox.open_board(2).step == 2
    path = setup.session.run_dir / "decisions" / "rank-000.jsonl"
    assert type(parts.decisions) is DecisionLog
    row = {"decision": "next_move", "args": [], "answer": "train"}
    parts.decisions(row)
    parts.close()
    first, *_, last = map(json.loads, path.read_text().splitlines())
    assert last == row, "it was in memory"
    assert first == json.loads(
        json.dumps(record_header(spec, runner.scheduler.roles, setup.last_step))
    )
    parts.close()
    # A rank that joins counts as fast as the profile says of the last rollout, until it has measured.
    for stage, known in (("generate", 7.0), ("train", 0.0)):
        joins = replace(
            setup, world=World(3, 2, 1), expected={(stage, 2): 7.0}, spec=ASYNC, sharding="ddp"
        )
        assert joins.world.joined
        found = wire_parts(replace(runtime, setup=joins), io, savers)
        assert found.runner._task_seconds == known
        found.close()
