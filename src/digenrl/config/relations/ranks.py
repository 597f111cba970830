"""Rules of ranks, pools and the lines between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from digenrl.config.relations.view import Absent, Rule, View, divisors, most_rollouts
from digenrl.rewards.needs import managed_gpus


def _async_rollouts(get: View) -> Iterator[str]:
    steps, rollouts = get("schedule.async_steps"), get("allocation.rollouts")
    if steps and rollouts == 0:
        yield (
            f"schedule.async_steps = {steps} with allocation.rollouts = 0: without rollout ranks "
            "nobody generates "
            "while others train; set allocation.rollouts to 1 or more, or schedule.async_steps=0."
        )


def _share_counts(get: View) -> Iterator[str]:
    shares, trainers = get("schedule.shares"), get("allocation.trainers")
    if not isinstance(shares, list):
        return
    if sum(shares) <= 0:
        yield f"schedule.shares = {shares}: at least one share must be above 0."
    if isinstance(trainers, int) and len(shares) != trainers:
        yield (
            f"schedule.shares = {shares}: has {len(shares)} entries for allocation.trainers = "
            f"{trainers}; give one for each trainer rank, or schedule.shares=equal."
        )


def _sharded_trainers(get: View) -> Iterator[str]:
    sharding, trainers = get("parallel.sharding"), get("allocation.trainers")
    if sharding in ("hsdp", "fsdp") and trainers == 1:
        yield (
            f"parallel.sharding = {sharding} with allocation.trainers = 1: there is nobody to "
            "share the weights with; set parallel.sharding=ddp or allocation.trainers to 2 or more."
        )


def _shard_group(get: View) -> Iterator[str]:
    sharding, group, trainers = (
        get("parallel.sharding"),
        get("parallel.shard_group"),
        get("allocation.trainers"),
    )
    # auto may become hsdp, whose groups this number then fixes.
    if sharding not in ("hsdp", "auto"):
        if group != "auto":
            yield (
                f"parallel.shard_group = {group} with parallel.sharding = {sharding}: only hsdp "
                "has shard groups; set parallel.sharding=hsdp, or parallel.shard_group=auto."
            )
    elif isinstance(group, int) and isinstance(trainers, int) and trainers % group:
        yield (
            f"parallel.shard_group = {group}: must divide allocation.trainers = {trainers}; "
            f"allowed: {divisors(trainers)}, or auto."
        )


def saves_bytes(share: float, trainers: int) -> bool:
    """Return whether fewer bytes travel with this share of a gradient's values than with all.

    A value travels with its place, to every other trainer: 8 (n - 1) bytes. An all-reduce moves
    8 (n - 1) / n bytes for each value.

    Example:
        >>> saves_bytes(0.3, trainers=3), saves_bytes(0.3, trainers=4), saves_bytes(0.3, trainers=1)
        (True, False, False)
    """
    return trainers > 1 and share * trainers < 1.0


def _joins_places(get: View) -> bool:
    """Return whether lines join pools in different places (`hardware.links` has no default)."""
    try:
        return bool(get("hardware.links"))
    except Absent:
        return False


def _compressed_gradients(get: View) -> Iterator[str]:
    share, trainers = get("parallel.compress"), get("allocation.trainers")
    if share == "off":
        return
    sharding, lines = get("parallel.sharding"), _joins_places(get)
    # `auto` becomes off where all trainers are in one place. Elsewhere `settle` refuses shards, and
    # off too.
    if share != "auto" and sharding in ("hsdp", "fsdp"):
        where = " with all trainers in one place of hardware.links" * lines
        yield (
            f"parallel.compress = {share} with parallel.sharding = {sharding}: only replicas "
            f"exchange whole gradients; set parallel.sharding=ddp, or parallel.compress=off{where}."
        )
    if trainers == 1:
        yield (
            f"parallel.compress = {share} with allocation.trainers = 1: there is nobody to "
            "exchange gradients with; set parallel.compress=off or allocation.trainers to 2 or "
            "more."
        )
    elif (
        isinstance(share, float) and isinstance(trainers, int) and not saves_bytes(share, trainers)
    ):
        yield (
            f"parallel.compress = {share:g} with allocation.trainers = {trainers}: as many bytes "
            "would travel as without, because each value goes to every trainer, with its place; "
            f"set it below {1 / trainers:.3g}, or to {'auto' if lines else 'off'}."
        )


def _split_claims(get: View) -> Iterator[str]:
    # Colocated ranks all train and generate, so a fixed part takes nothing from anybody.
    if get("schedule.claims") != "split" or get("allocation.rollouts") == 0:
        return
    if isinstance(rollouts := get("allocation.rollouts"), Mapping):
        yield (
            f"allocation.rollouts = {rollouts} with schedule.claims = split: every rank has its "
            "part of the tasks, so none can join or leave; set schedule.claims=shared, or "
            "allocation.rollouts to a number."
        )
    if get("schedule.tag"):
        yield (
            "schedule.claims = split with schedule.tag = true: every rollout rank has its part of "
            "the tasks, so none "
            "is left for a trainer; set schedule.claims=shared or schedule.tag=false."
        )
    if (lost := get("allocation.max_lost_rollouts")) not in ("auto", 0):
        yield (
            f"allocation.max_lost_rollouts = {lost} with schedule.claims = split: nobody takes "
            "over the part of a rank that died; set schedule.claims=shared, or "
            "allocation.max_lost_rollouts to 0 or auto (which is 0 then)."
        )


def _recomputation_entries(get: View) -> Iterator[str]:
    kept, trainers = get("model.gradient_checkpointing"), get("allocation.trainers")
    if isinstance(kept, list) and isinstance(trainers, int) and len(kept) != trainers:
        yield (
            f"model.gradient_checkpointing = {kept}: has {len(kept)} entries for "
            f"allocation.trainers = {trainers}; give one for each trainer rank, or a single value."
        )


def _rank_counts(get: View) -> Iterator[str]:
    pools = {
        name: (pool.get("count", 1), pool.get("role", "auto"))
        for name, pool in get("hardware.pools").items()
    }
    trainers, rollouts = get("allocation.trainers"), most_rollouts(get("allocation.rollouts"))
    devices = sum(count for count, _ in pools.values())
    summary = ", ".join(f"{name}: {count} ({role})" for name, (count, role) in pools.items())
    # `auto` takes one rank at least.
    needed = sum(number if isinstance(number, int) else 1 for number in (trainers, rollouts))
    # One message: the counts by role, below, would only repeat it.
    if needed > devices:
        yield (
            f"allocation.trainers = {trainers} and allocation.rollouts = {rollouts}: need {needed} "
            f"ranks, but the hardware profile has {devices} ({summary}); lower one, set it to "
            "auto, or choose another hardware."
        )
        return
    for key, number, role in (("trainers", trainers, "trainer"), ("rollouts", rollouts, "rollout")):
        room = sum(count for count, its in pools.values() if its in ("auto", role))
        # Colocated ranks may be on any pool.
        if rollouts != 0 and isinstance(number, int) and number > room:
            yield (
                f"allocation.{key} = {number}: the hardware profile has {room} devices that may be "
                f"{role}s ({summary}); allowed: at most {room}."
            )


def _context_groups(get: View) -> Iterator[str]:
    context, trainers = get("parallel.context"), get("allocation.trainers")
    if context == 1:
        return
    if isinstance(trainers, int) and trainers % context:
        yield (
            f"parallel.context = {context}: must divide allocation.trainers = {trainers}; "
            f"allowed: {divisors(trainers)}."
        )
    # `measured` may leave 1:1 at any step, so it is refused like a list.
    if get("schedule.shares") != "equal":
        yield (
            f"schedule.shares = {get('schedule.shares')} with parallel.context = {context}: "
            "trainers that share the tokens of a forward are equally fast; set "
            "schedule.shares=equal, or parallel.context=1."
        )
    for name, pool in get("hardware.pools").items():
        # The default of `per_node`, because rules see the tree before defaults are filled in.
        node = pool.get("per_node") or min(pool.get("count", 1), 8)
        if pool.get("gpu") != "cpu" and pool.get("role", "auto") != "rollout" and node % context:
            yield (
                f"parallel.context = {context}: the {node} GPUs of a node of hardware.pools.{name} "
                f"do not divide into groups of {context}; allowed: {divisors(node)}."
            )


def _broadcast_members(get: View) -> Iterator[str]:
    if get("network.publication") != "broadcast":
        return
    rollouts, launch = get("allocation.rollouts"), get("launch")
    wrong = (
        "network.publication = broadcast with {}: {}; set {}, or network.publication=stream.".format
    )
    if isinstance(rollouts, Mapping):
        why = "a broadcast has the members that it began with, and others are to join"
        yield wrong(
            f"allocation.rollouts = {dict(rollouts)}", why, "allocation.rollouts to a number"
        )
    if launch == "ray":
        why = "Ray replaces a rollout that dies, and who joins is no member of a broadcast"
        yield wrong("launch = ray", why, "launch=local")


def _pool_links(get: View) -> Iterator[str]:
    pools, seen = sorted(get("hardware.pools")), dict[frozenset[str], str]()
    for name, entry in get("hardware.links").items():
        # A set, because a link has no direction.
        pair = frozenset(entry["between"])
        if len(pair) < 2 or not pair <= set(pools):
            yield (
                f"hardware.links.{name}.between = {list(entry['between'])}: does not name two "
                f"pools of the hardware profile; its pools are {', '.join(pools)}."
            )
        elif pair in seen:
            yield (
                f"hardware.links.{name}: joins the pools of hardware.links.{seen[pair]}; leave one "
                "of them."
            )
        seen[pair] = name


def _ray_resources(get: View) -> Iterator[str]:
    pools = sorted(get("hardware.pools"))
    for name in sorted(set(get("ray.resources")) - set(pools)):
        yield (
            f"ray.resources.{name}: is no pool of the hardware profile; its pools are "
            f"{', '.join(pools)}."
        )


def _judge_gpus(get: View) -> Iterator[str]:
    try:
        wanted = managed_gpus(get("reward"))
    except ValueError as error:
        yield str(error)
        return
    needed, names = sum(wanted.values()), ", ".join(name for name in wanted if wanted[name])
    for name, pool in get("hardware.pools").items():
        key, judges = f"hardware.pools.{name}.judges", pool.get("judges", 0)
        if judges and judges != needed:
            yield (
                f"{key} = {judges}: rewards placed managed take {needed} GPUs of each node "
                f"({names or 'none is'}); set {key}={needed}."
            )
        # Ranks of such a pool generate, so scorers must be on their nodes.
        scores = pool.get("role", "auto") != "trainer" and pool.get("gpu") != "cpu"
        if needed and not judges and scores:
            yield (
                f"{key} = 0: {names} placed managed needs {needed} GPUs of each node that "
                f"generates; set {key}={needed}, or another placement."
            )


RULES: tuple[Rule, ...] = (
    _async_rollouts,
    _share_counts,
    _sharded_trainers,
    _shard_group,
    _compressed_gradients,
    _split_claims,
    _recomputation_entries,
    _rank_counts,
    _context_groups,
    _broadcast_members,
    _pool_links,
    _ray_resources,
    _judge_gpus,
)
