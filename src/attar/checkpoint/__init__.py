"""Checkpoints: opened by their headers, written atomically, each with a card of its lineage."""

from attar.checkpoint.card import Card, Parent
from attar.checkpoint.open import Checkpoint, TensorInfo, check_finite, open_checkpoint
from attar.checkpoint.output import StageOutput, produce
from attar.checkpoint.paths import resolve
from attar.checkpoint.shards import ShardWriter, write_checkpoint_tensors

__all__ = [
    "Card",
    "Checkpoint",
    "Parent",
    "ShardWriter",
    "StageOutput",
    "TensorInfo",
    "check_finite",
    "open_checkpoint",
    "produce",
    "resolve",
    "write_checkpoint_tensors",
]
