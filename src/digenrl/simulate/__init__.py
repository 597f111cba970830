"""A run in virtual time, and the planner on top. Pure: standard library only, no torch, no clock, no I/O.

Where it fits: `costs` and `memory` turn a model, a workload and a hardware profile into seconds and bytes;
`virtual_cluster` holds them per rank; `virtual_run` drives the schedule of `digenrl.schedule` with them; `bound` says
what no schedule can beat; `planner` compares.
"""
