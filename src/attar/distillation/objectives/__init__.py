"""Distillation objectives: one file for each family, and the table of their names.

An objective is a pure function ``loss_and_grad(z, t, T, **options) -> (values, dz)`` of a block of logits:
the loss of each token, and its gradient by the student's logits (``chunked.py``). ``hard`` takes targets for
the teacher's logits. Options: ``beta`` of jsd; ``skew`` of skew-kl and skew-reverse-kl.
"""

from attar.distillation.objectives import forward_kl, hard, jsd, overlap, reverse_kl, skew_kl
from attar.distillation.objectives.chunked import LossAndGrad

OBJECTIVES: dict[str, LossAndGrad] = {
    "kl": forward_kl.loss_and_grad,
    "reverse-kl": reverse_kl.loss_and_grad,
    "jsd": jsd.loss_and_grad,
    "skew-kl": skew_kl.loss_and_grad,
    "skew-reverse-kl": skew_kl.reverse_loss_and_grad,
    "tv": overlap.total_variation_loss_and_grad,
    "lk": overlap.lk_loss_and_grad,
    "hard": hard.loss_and_grad,
}
