"""Tasks: what a model predicts. One file each, and the table of their names."""

from attar.distillation.tasks.causal import causal
from attar.distillation.tasks.task import Task

TASKS: dict[str, Task] = {"causal": causal}
