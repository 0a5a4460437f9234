"""Distillation objectives: one file for each family, and the table of their names.

An objective is a pure function ``slopes(z, t, T, **options) -> (values, dz)`` of a block of logits: the loss
of each token, and its gradient by the student's logits (``chunked.py``). ``hard`` takes targets for the
teacher's logits. Options: ``beta`` of jsd; ``skew`` of skew-kl and skew-reverse-kl.
"""

from attar.distillation.objectives import forward_kl, hard, jsd, overlap, reverse_kl, skew_kl
from attar.distillation.objectives.chunked import Slopes

OBJECTIVES: dict[str, Slopes] = {
    "kl": forward_kl.slopes,
    "reverse-kl": reverse_kl.slopes,
    "jsd": jsd.slopes,
    "skew-kl": skew_kl.slopes,
    "skew-reverse-kl": skew_kl.reverse_slopes,
    "tv": overlap.total_variation_slopes,
    "lk": overlap.lk_slopes,
    "hard": hard.slopes,
}
