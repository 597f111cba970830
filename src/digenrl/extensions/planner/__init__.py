"""Simulation, plans and advice: what a run will cost, and the values for `auto`."""

from digenrl.cli.commands import Command
from digenrl.extensions.planner.keys import PlanKeys

COMMANDS = {
    "plan": Command(
        "digenrl.extensions.planner.cli.plan",
        "what a run will cost on a hardware profile; needs no GPU",
    ),
    "profile": Command(
        "digenrl.extensions.planner.cli.profile",
        "measure this machine's seconds per unit, for a hardware profile",
    ),
}
COMPONENTS = (
    "digenrl.extensions.planner.emulate.Durations",
    "digenrl.extensions.planner.emulated.EmulatedLine",
    "digenrl.extensions.planner.emulated.EmulatedPolicy",
)
"""Classes that stand in for networks and lines in an emulated run."""
SCHEMAS = {"plan": PlanKeys}
