"""Distillation objectives: one file for each family, and the table of their names.

An objective is a pure function ``slopes(z, t, T, **options) -> (values, dz)`` of a chunk of logits: the loss
of each token, and its gradient by the student's logits (``chunked.py``). ``hard`` takes targets for the
teacher's logits. Options: ``beta`` of jsd; ``skew`` of skew-kl and skew-reverse-kl.
"""

from collections.abc import Callable

from torch import Tensor

from attar.distillation.objectives import forward_kl, hard, jsd, overlap, reverse_kl, skew_kl
from attar.distillation.objectives.chunked import Slopes, on_logits

SLOPES: dict[str, Slopes] = {
    "kl": forward_kl.slopes,
    "reverse-kl": reverse_kl.slopes,
    "jsd": jsd.slopes,
    "skew-kl": skew_kl.slopes,
    "skew-reverse-kl": skew_kl.reverse_slopes,
    "tv": overlap.total_variation_slopes,
    "lk": overlap.lk_slopes,
    "hard": hard.slopes,
}


def _mean(slopes: Slopes) -> Callable[[Tensor, Tensor, float], Tensor]:
    return lambda student, teacher, temperature: on_logits(slopes, student, teacher, T=temperature)


OBJECTIVES = {name: _mean(slopes) for name, slopes in SLOPES.items()}
OBJECTIVES["kl"] = forward_kl.forward_kl
