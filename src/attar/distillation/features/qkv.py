"""Relations of queries, keys and values: how alike the queries of two tokens are, and their keys, and values.
Models may differ in heads and widths, and no projection is trained.

    R = softmax over keys of x x^T / sqrt(d) ;   KL(R' || R), mean over x of q, k, v, over heads and queries

Wang, Bao, Huang, Dong, Wei 2021, "MiniLMv2", arXiv 2012.15828, eqs. 5 to 8. The projections are cut into as
many relation heads in both models; MiniLM (arXiv 2002.10957) has the relation of values. Both compare one
layer, mostly the last: ``feature_map`` top.

Differs from the paper: any pairs of layers; queries and keys are taken before rotary positions; the heads are
as many as leave 16 columns in the narrowest projection (the paper's 48 of 768). In a decoder tokens are
related to later ones too, which is no leak: both sides of the loss have read the same text.

Letters: x and x' (B, S, heads * d) one of q, k, v of student and teacher, R and R' relations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

from attar.distillation.features.feature import ComparedModels, Feature
from attar.distillation.outputs import Intermediates, ModelOutputs

COLUMNS = 16  # of a relation head, at least


def relations(x: Tensor, mask: Tensor, heads: int) -> Tensor:
    """Log R, float32 (B, heads, S, S), -inf where a key is no token.

    Args:
        x: (B, S, heads * d).
        mask: bool (B, S), True where there is a token.
    """
    parts = x.float().unflatten(-1, (heads, -1)).transpose(1, 2)
    scores = parts @ parts.transpose(-1, -2) / math.sqrt(parts.shape[-1])
    return scores.masked_fill(~mask[:, None, None], -math.inf).log_softmax(-1)


def relation_divergence(student: Tensor, teacher: Tensor, mask: Tensor, heads: int) -> Tensor:
    """KL of each query, mean over heads, float32 (B, S); projections (B, S, H) of student and teacher."""
    log_r, log_target = relations(student, mask, heads), relations(teacher, mask, heads)
    difference = (log_target - log_r).masked_fill(~mask[:, None, None], 0.0)  # not infinity - infinity
    return (log_target.exp() * difference).sum(-1).mean(1)


def relation_heads(widths: set[int]) -> int:
    """The most heads that divide all widths and leave :data:`COLUMNS` in each; 1 where none do."""
    common = math.gcd(*widths)
    most = max(min(widths) // COLUMNS, 1)
    return max(heads for heads in range(1, most + 1) if common % heads == 0)


def qkv(models: ComparedModels) -> Feature:
    """The relations of all pairs of layers."""
    widths = {x.shape[-1] for side in (models.student, models.teacher) for layer in side.qkv for x in layer}
    heads = relation_heads(widths)

    def loss(student: ModelOutputs, teacher: ModelOutputs, projections: Mapping[str, nn.Module]) -> Tensor:
        def of_pair(i: int, j: int) -> Tensor:
            both = zip(student.qkv[i], teacher.qkv[j], strict=True)
            parts = [relation_divergence(*pair, student.mask, heads) for pair in both]
            return sum(parts[1:], parts[0])[student.compared] / len(parts)

        return models.mean(of_pair, projections)

    return Feature("qkv", loss, Intermediates(qkv=True), projections=models.weights)
