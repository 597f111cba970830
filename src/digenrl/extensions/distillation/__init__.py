"""Distillation of several teachers into one student on the student's own trajectories."""

from digenrl.extensions.distillation.settings import teacher_problems

RULES = (teacher_problems,)
