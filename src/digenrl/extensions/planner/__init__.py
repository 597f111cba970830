"""Simulation, plans and advice: what a run will cost, and the values for `auto`."""

from digenrl.config.commands import Command

COMMANDS = {
    "plan": Command(
        "digenrl.extensions.planner.cli.plan",
        "what a run will cost on a hardware profile; needs no GPU",
        sweeps=True,
    ),
    "profile": Command(
        "digenrl.extensions.planner.cli.profile",
        "measure this machine's seconds per unit, for a hardware profile",
    ),
}
