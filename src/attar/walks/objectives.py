"""Language-modelling losses that several stages need: next token for decoders, masked token for encoders; and
how far a changed model's predictions are from the original's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MASKED = 0.15  # fraction of tokens hidden from an encoder (Devlin et al. 2018, arXiv 1810.04805, section 3.1)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of each token given those before it, in nats, mean over the predicted tokens.

    Args:
        logits: (B, S, V).
        tokens: int64 (B, S); -100 where there is no token, which is left out.
    """
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def masked_token_loss(model: nn.Module, tokens: Tensor, mask_token: int, seed: int = 0) -> Tensor:
    """Cross-entropy at 15 % of the places, hidden behind the mask token, in nats, mean over those places.

    Args:
        model: gives ``.logits`` (B, S, V).
        tokens: int64 (B, S).
        mask_token: its number.
        seed: of the choice of places.
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

    Written so because the difference of two log-softmaxes in float32 is off by 1e-6, which is what one layer
    at 8 bits costs; this is exactly 0 for equal logits and else off by a few 1e-8.

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
    """How far a model's predictions are from the reference's.

    Attributes:
        kl: mean KL(reference || model), nats a token; not a number where the model's logits are not finite.
        top1: fraction of tokens at which both prefer the same next token.
        blind: the KL of the one distribution that knows the reference's average but nothing of the context,
            H(mean p) - mean H(p): who is as far away as this has forgotten the context.
        tokens: how many were counted.
    """

    kl: float
    top1: float
    blind: float
    tokens: int


def model_kl(reference: nn.Module, model: nn.Module, batches: Iterable[Tensor]) -> Distance:
    """Compare two models of one vocabulary over batches of tokens.

    Args:
        reference: gives ``.logits`` (B, S, V); in evaluation mode.
        model: likewise; may be on another device.
        batches: int64 (B, S), padded on the right with negative numbers, which are left out.
    """
    total = DistanceSum()
    for batch in batches:
        kept = batch.flatten() >= 0
        total.add(*(_flat_logits(each, batch, kept) for each in (reference, model)))
    return total.distance()


class DistanceSum:
    """Sums over tokens from which a :class:`Distance` follows; temporaries have :data:`CHUNK_ELEMENTS`."""

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
            known = part.float().softmax(-1)
            self.entropy -= float(torch.special.xlogy(known, known).sum(dtype=torch.float64))
            seen = known.sum(0, dtype=torch.float64).cpu()
            self.mean = seen if self.mean is None else self.mean.add_(seen)

    def distance(self) -> Distance:
        """The means over all tokens."""
        assert self.mean is not None and self.tokens, "no tokens to compare"
        average = self.mean / self.tokens
        spread = -float(torch.special.xlogy(average, average).sum())
        blind = max(spread - self.entropy / self.tokens, 0.0)
        return Distance(self.kl / self.tokens, self.same / self.tokens, blind, self.tokens)


def _flat_logits(model: Any, batch: Tensor, kept: Tensor) -> Tensor:
    """Logits (N, V) of the tokens that are no padding."""
    device = next(model.parameters()).device
    with torch.no_grad():
        logits: Tensor = model(input_ids=batch.clamp(min=0).to(device)).logits.flatten(0, 1)
    return logits if bool(kept.all()) else logits[kept.to(logits.device)]


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    """The train walk's plainest loss: :func:`next_token_loss` of the model's logits.

    Args:
        model: gives ``.logits`` (B, S, V).
        tokens: int64 (B, S); -100 where there is no token.
    """
    return next_token_loss(model(input_ids=tokens.clamp(min=0)).logits, tokens)


def agreement(
    teacher: nn.Module, alpha: float = 1.0, temperature: float = 1.0
) -> Callable[[nn.Module, Tensor], Tensor]:
    """A loss for the train walk: alpha T^2 KL(teacher || model) + (1 - alpha) cross-entropy, in nats, mean
    over the predicted tokens.

    Args:
        teacher: run beside the model, without gradients; it must not share the parameters that are trained.
        alpha: weight of the soft loss, 0 to 1.
        temperature: T.
    """

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        shown, predicted = tokens.clamp(min=0), tokens[:, 1:] >= 0
        logits = model(input_ids=shown).logits
        total = logits.new_zeros((), dtype=torch.float32)
        if alpha > 0.0:
            with torch.no_grad():
                guide = teacher(input_ids=shown).logits[:, :-1][predicted]
            total = total + alpha * divergence(logits[:, :-1][predicted], guide, temperature)
        if alpha < 1.0:
            total = total + (1.0 - alpha) * next_token_loss(logits, tokens)
        return total

    return loss


def divergence(logits: Tensor, guide: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 KL(softmax(guide / T) || softmax(logits / T)) in nats, mean over tokens; both (n, V)."""
    log_q = F.log_softmax(logits.float() / temperature, dim=-1)
    log_p = F.log_softmax(guide.float() / temperature, dim=-1)
    return temperature**2 * F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
