"""Attention maps: each token is to look where the teacher's token looks.

    mse      sum over keys (a - a')^2
    kl       sum over keys a' ln(a' / a)               (MiniLM, Wang et al. 2020, arXiv 2002.10957, eq. 4)
    scores   mean over keys (s - s')^2 ,   s = ln a - mean over keys ln a         (TinyBERT, Jiao et al. 2020,
        arXiv 1909.10351, eq. 7, which compares the scores before the softmax)

of each query, mean over heads. The centred log weights are the scores, up to the constant that the softmax
ignores; keys that either model does not see are left out of them. MiniLM compares the last layers alone
(``feature_map`` top).

Differs from the papers: mse sums over keys, of which a distribution over many has small weights. Models with
different numbers of heads are compared by their mean over heads; relations of queries, keys and values
(``qkv.py``) do not average.

Letters: a and a' attention weights of a query of student and teacher, (heads, S); m queries, S keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from attar.distillation.features.feature import ComparedModels, Feature
from attar.distillation.outputs import Intermediates, ModelOutputs

SMALLEST = 1e-12  # weights below count as this in logarithms


def attention_distance(student: Tensor, teacher: Tensor, kind: str = "mse") -> Tensor:
    """Of each query, float32 (m,).

    Args:
        student: attention weights (m, heads, S); 0 where a key is not seen.
        teacher: the same, with any number of heads.
        kind: mse, kl or scores.
    """
    a, target = student.float(), teacher.float()
    if a.shape[1] != target.shape[1]:
        a, target = a.mean(1, keepdim=True), target.mean(1, keepdim=True)
    if kind == "mse":
        return (a - target).square().sum(-1).mean(-1)
    log_a, log_target = (x.clamp(min=SMALLEST).log() for x in (a, target))
    if kind == "kl":
        return (target * (log_target - log_a)).sum(-1).mean(-1)
    seen = (a > 0) & (target > 0)
    keys = seen.sum(-1, keepdim=True).clamp(min=1)
    difference = torch.where(seen, log_a - log_target, 0.0)
    centred = torch.where(seen, difference - difference.sum(-1, keepdim=True) / keys, 0.0)
    return (centred.square().sum(-1) / keys[..., 0]).mean(-1)


def _attention(kind: str, models: ComparedModels) -> Feature:
    """The attention maps of all pairs of layers."""

    def loss(student: ModelOutputs, teacher: ModelOutputs, projections: Mapping[str, nn.Module]) -> Tensor:
        queries = student.compared

        def of_pair(i: int, j: int) -> Tensor:
            maps = student.attentions[i].transpose(1, 2)[queries]
            return attention_distance(maps, teacher.attentions[j].transpose(1, 2)[queries], kind)

        return models.mean(of_pair, projections)

    return Feature("attention", loss, Intermediates(attentions=True), projections=models.weights)


attention, attention_kl, attention_scores = (partial(_attention, kind) for kind in ("mse", "kl", "scores"))
