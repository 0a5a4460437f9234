"""Features: ways to compare the intermediates of student and teacher. One file each, and the table of their
names.

A feature is made by its function from :class:`ComparedModels`, what a short run of both shows of them.
"""

from __future__ import annotations

from collections.abc import Callable

from attar.distillation.features.attention import attention, attention_kl, attention_scores
from attar.distillation.features.embeddings import embeddings
from attar.distillation.features.feature import ComparedModels, Feature
from attar.distillation.features.hidden import hidden, hidden_cosine, hidden_relative
from attar.distillation.features.patient import patient
from attar.distillation.features.qkv import qkv
from attar.distillation.features.relation import relation
from attar.distillation.features.rkd import angle, distance

FEATURES: dict[str, Callable[[ComparedModels], Feature]] = {
    "hidden": hidden,
    "hidden-relative": hidden_relative,
    "hidden-cosine": hidden_cosine,
    "patient": patient,
    "embeddings": embeddings,
    "attention": attention,
    "attention-kl": attention_kl,
    "attention-scores": attention_scores,
    "qkv": qkv,
    "relation": relation,
    "distance": distance,
    "angle": angle,
}
