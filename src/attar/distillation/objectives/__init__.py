"""Distillation objectives: one file for each family, and the table of their names.

An objective is ``objective(student, teacher, temperature)``: logits (n, V) or (..., V) of both models to a
scalar, the mean over tokens; the student's logits receive the gradient.
"""

from attar.distillation.objectives.forward_kl import forward_kl
from attar.distillation.objectives.overlap import lk, total_variation

OBJECTIVES = {"kl": forward_kl, "lk": lk, "tv": total_variation}
