"""The signal of sampled text: what the teacher thinks of the tokens that the student drew.

Rows without log-probabilities of their own (held-out text) are judged by the reverse KL at each position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.data.examples import Examples
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.objectives.chunked import BYTES, LossAndGrad, blockwise
from attar.distillation.outputs import Intermediates, ModelOutputs
from attar.distillation.policy import minillm as minillm_loss
from attar.distillation.policy import policy_gradient
from attar.distillation.rollouts.sampling import Rollouts
from attar.distillation.settings import LearnSettings
from attar.distillation.signals.online import OnlineTarget, OnlineTeacher
from attar.distillation.signals.target import SignalSource
from attar.errors import SettingsError
from attar.models.head import head_of


def policy_signal(source: SignalSource, student: Any, settings: LearnSettings) -> PolicyTeacher:
    """The settings' loss of sampled text."""
    if source.tokens.retokenizer is not None:
        allowed = "kl, reverse-kl or jsd with a teacher that has another tokenizer"
        raise SettingsError("objective", settings.soft_loss, allowed)
    objective, head = OBJECTIVES["reverse-kl"], head_of(source.teacher)
    vocabulary = source.tokens.vocabulary
    on_text = OnlineTeacher(source.teacher, objective, settings.temperature, head, vocabulary)
    return PolicyTeacher(on_text, settings.soft_loss == "minillm")


@dataclass(frozen=True)
class PolicyTeacher:
    """A teacher that judges the student's own text.

    Attributes:
        on_text: the teacher where the text is not the student's.
        minillm: whether the loss is MiniLLM's, else the plain policy gradient.
    """

    on_text: OnlineTeacher
    minillm: bool = False

    def target(self, batch: Examples, intermediates: Intermediates) -> OnlineTarget | PolicyTarget:
        """See :class:`attar.distillation.signals.target.Signal`."""
        target = self.on_text.target(batch, intermediates)
        if not isinstance(batch, Rollouts):
            return target
        log_p = torch.zeros_like(batch.policy)
        log_p[batch.predicted] = token_logprobs(target, batch.labels)
        return policy_target(target, batch, log_p, minillm=self.minillm)


def policy_target(target: OnlineTarget, batch: Rollouts, log_p: Tensor, *, minillm: bool) -> PolicyTarget:
    """The target of rows.

    Args:
        log_p: float32 (B, S), the teacher's log-probabilities of what is predicted.
    """
    read = batch.behaviour.isnan() & batch.predicted
    drawn = batch.predicted & ~read
    log_p, behaviour, policy = (x.masked_fill(~drawn, 0.0) for x in (log_p, batch.behaviour, batch.policy))
    if minillm:
        terms = _minillm_terms(log_p, behaviour, policy, drawn, read)
        weights = [x[batch.predicted] for x in terms]
        return PolicyTarget(target, minillm_loss.loss_and_grad, batch.labels, weights, True)
    assert not bool(read.any()), "text in a batch of the policy gradient"
    plain = [x[batch.predicted] for x in policy_gradient.terms(log_p, behaviour, policy)]
    return PolicyTarget(target, policy_gradient.loss_and_grad, batch.labels, plain, False)


def _minillm_terms(
    log_p: Tensor, behaviour: Tensor, policy: Tensor, drawn: Tensor, read: Tensor
) -> minillm_loss.MiniLLMTerms:
    """Weighted so that the mean over all predictions is the mean over drawn tokens plus the mean over read
    ones."""
    terms = minillm_loss.terms(log_p, behaviour, policy, drawn)
    drawn_count, read_count = max(int(drawn.sum()), 1), max(int(read.sum()), 1)
    n = int(drawn.sum()) + int(read.sum())
    return terms._replace(
        advantage=terms.advantage * (n / drawn_count),
        step=terms.step * (n / drawn_count),
        text=read.to(terms.step.dtype) * (n / read_count),
    )


@dataclass(frozen=True)
class PolicyTarget:
    """The teacher's judgement of a batch.

    Attributes:
        target: its predictions.
        objective: of the student's logits, the teacher's if ``reads_logits``, tokens and ``terms``.
        labels: int64 (n,).
        terms: (n,) each.
    """

    target: OnlineTarget
    objective: LossAndGrad
    labels: Tensor
    terms: list[Tensor]
    reads_logits: bool

    @property
    def outputs(self) -> ModelOutputs:
        """Of the teacher."""
        return self.target.outputs

    def loss_and_grad(self, z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """See :class:`attar.distillation.signals.target.SoftTarget`."""
        terms = [self.labels[part], *(x[part] for x in self.terms)]
        width = min(z.shape[-1], self.target.vocabulary or z.shape[-1])
        if self.reads_logits:
            t = self.outputs.logits(part)
            width = min(width, t.shape[-1])
            terms = [t[:, :width], *terms]
        known = z[:, :width]
        values, _ = blockwise(self.objective, known, *terms, T=self.target.temperature, out=known)
        z[:, width:] = 0.0
        return values, z


def token_logprobs(target: OnlineTarget, labels: Tensor) -> Tensor:
    """float32 (n,): the teacher's log-probabilities of tokens (n,) at its temperature, chunk by chunk."""
    outputs, parts = target.outputs, []
    width = outputs.predictions.shape[-1] if outputs.head is None else len(outputs.head.weight)
    rows = max(1, BYTES // (4 * width))
    for chunk, part in zip(labels.split(rows), range(0, len(labels), rows), strict=True):
        t = outputs.logits(slice(part, part + rows))[:, : target.vocabulary].float() / target.temperature
        parts.append(t.log_softmax(-1).gather(1, chunk[:, None])[:, 0])
    return torch.cat(parts) if parts else labels.float()
