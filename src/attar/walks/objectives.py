"""Losses of language models that several stages share (next token, masked token, distillation), and the
distance of a changed model's predictions from the original's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[nn.Module, Any], Tensor]
"""``loss(model, batch)``: what the loop's source gives, tokens int64 (B, S), -100 where there is none, or
:class:`attar.data.examples.Examples`, to the mean over what is predicted."""

SoftLoss = Callable[[Tensor, Tensor], Tensor]
"""``soft(logits, tokens)``: the student's logits (B, S, V) and the tokens (B, S) to a scalar, the mean over
the predicted tokens of how far the student is from its teacher."""

Objective = Callable[[Tensor, Tensor, float], Tensor]
"""``objective(student, teacher, temperature)``: logits (n, V) to a scalar, the mean over tokens."""

MASKED = 0.15  # fraction of tokens hidden from an encoder (Devlin et al. 2018, arXiv 1810.04805, section 3.1)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of each token given those before it, in nats, mean over the predicted tokens.

    Args:
        logits: (B, S, V).
        tokens: int64 (B, S); -100 where there is no token, which is left out.
    """
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def masked_token_loss(model: nn.Module, tokens: Tensor, mask_token: int, seed: int = 0) -> Tensor:
    """Cross-entropy at 15 % of the positions, replaced by the mask token, in nats, mean over those positions.

    Args:
        model: gives ``.logits`` (B, S, V).
        tokens: int64 (B, S).
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.rand(tokens.shape, generator=generator) < MASKED
    hidden[:, 0] = True  # never an empty choice
    hidden = hidden.to(tokens.device)
    logits = model(input_ids=tokens.masked_fill(hidden, mask_token)).logits
    return F.cross_entropy(logits[hidden].float(), tokens[hidden])


CHUNK_ELEMENTS = 1 << 20  # logits whose float32 exponentials exist at once


def token_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) of every token, in nats: float64 (N,). Does not modify its inputs.

        KL = sum_v e^x_v (x_v - y_v) / P + ln Q - ln P      x, y: logits less their maximum
                                                            P, Q: sums of e^x, e^y

    The difference of two log-softmaxes in float32 is off by 1e-6, which is what one layer at 8 bits costs;
    this is exactly 0 for equal logits and else off by a few 1e-8.

    Args:
        p_logits: (N, V) of the reference, any float type.
        q_logits: (N, V) of the model under test.
    """
    rows = max(1, CHUNK_ELEMENTS // p_logits.shape[-1])
    pairs = zip(p_logits.split(rows), q_logits.split(rows), strict=True)
    return torch.cat([_chunk_kl(p.to(q.device), q) for p, q in pairs])


def _chunk_kl(p: Tensor, q: Tensor) -> Tensor:
    x, y = (z.float() - z.float().amax(-1, keepdim=True) for z in (p, q))
    weight = x.exp()
    P, Q = weight.sum(-1, dtype=torch.float64), y.exp().sum(-1, dtype=torch.float64)
    product = (weight * (x - y)).masked_fill_(weight == 0, 0.0)  # 0 ln 0 = 0, and not 0 * infinity
    return (product.sum(-1, dtype=torch.float64) / P + Q.log() - P.log()).clamp(min=0.0)


class Distance(NamedTuple):
    """The distance of a model's predictions from the reference's.

    Attributes:
        kl: mean KL(reference || model), nats a token; NaN where the model's logits are not finite.
        top1: fraction of tokens with the same likeliest next token.
        blind: KL(reference || its average distribution) = H(mean p) - mean H(p): a model as far away as
            this ignores the context.
        tokens: how many were counted.
    """

    kl: float
    top1: float
    blind: float
    tokens: int


class DistanceSum:
    """Sums over tokens that give a :class:`Distance`; temporaries have :data:`CHUNK_ELEMENTS` numbers."""

    def __init__(self) -> None:
        self.kl, self.entropy, self.same, self.tokens = 0.0, 0.0, 0, 0
        self.mean: Tensor | None = None

    def add(self, p: Tensor, q: Tensor) -> None:
        """Add tokens: logits (N, V) of the reference and of the model under test, each of any float type and
        on any device. Does not modify its inputs."""
        self.kl += float(token_kl(p, q).sum())
        self.same += int((p.argmax(-1).cpu() == q.argmax(-1).cpu()).sum())
        self.tokens += len(p)
        for part in p.split(max(1, CHUNK_ELEMENTS // p.shape[-1])):
            probabilities = part.float().softmax(-1)
            self.entropy -= float(torch.special.xlogy(probabilities, probabilities).sum(dtype=torch.float64))
            total = probabilities.sum(0, dtype=torch.float64).cpu()
            self.mean = total if self.mean is None else self.mean.add_(total)

    def distance(self) -> Distance:
        """The means over all tokens."""
        assert self.mean is not None and self.tokens, "no tokens to compare"
        average = self.mean / self.tokens
        spread = -float(torch.special.xlogy(average, average).sum())
        blind = max(spread - self.entropy / self.tokens, 0.0)
        return Distance(self.kl / self.tokens, self.same / self.tokens, blind, self.tokens)


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    """The plain loss of training: :func:`next_token_loss` of the model's logits.

    Args:
        model: gives ``.logits`` (B, S, V).
        tokens: int64 (B, S); -100 where there is no token.
    """
    return next_token_loss(model(input_ids=tokens.clamp(min=0)).logits, tokens)


def distillation_loss(soft: SoftLoss, alpha: float = 1.0) -> Loss:
    """A loss for the train walk: alpha * soft + (1 - alpha) * cross-entropy, mean over the predicted tokens.

    Args:
        soft: the soft loss, see :data:`SoftLoss`.
        alpha: its weight, 0 to 1.
    """

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens.clamp(min=0)).logits
        total = logits.new_zeros((), dtype=torch.float32)
        if alpha > 0.0:
            total = total + alpha * soft(logits, tokens)
        if alpha < 1.0:
            total = total + (1.0 - alpha) * next_token_loss(logits, tokens)
        return total

    return loss


def soft_loss(teacher: nn.Module, temperature: float = 1.0, objective: Objective | None = None) -> SoftLoss:
    """The soft loss of a teacher that runs in every step; padding is left out.

    Args:
        teacher: run without gradients; it must not share the parameters that are trained.
        temperature: T.
        objective: of the logits (n, V) of the predicted tokens; by default :func:`divergence`.
            Vocabularies padded to different widths are compared over the common part.
    """

    def soft(logits: Tensor, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(input_ids=tokens.clamp(min=0)).logits
        width, predicted = min(target.shape[-1], logits.shape[-1]), tokens[:, 1:] >= 0
        student, target = (z[:, :-1, :width] for z in (logits, target))
        if not bool(predicted.all()):
            student, target = student[predicted], target[predicted]
        return (objective or divergence)(student.flatten(0, -2), target.flatten(0, -2), temperature)

    return soft


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 KL(teacher || student) in nats, mean over tokens; logits (n, V)."""
    log_q = F.log_softmax(student.float() / temperature, dim=-1)
    log_p = F.log_softmax(teacher.float() / temperature, dim=-1)
    return temperature**2 * F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
