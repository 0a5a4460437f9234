"""A draft head from its folder, joined to the runner of its target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attar.errors import ModelError
from attar.models.draft_heads.folder import load_draft_head
from attar.runtime.loading import Loaded
from attar.runtime.speculate.heads.context import ContextReader
from attar.runtime.speculate.heads.medusa import MedusaProposer
from attar.runtime.speculate.proposer import Proposer

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

PROPOSERS: dict[str, Any] = {"medusa": MedusaProposer}
"""The proposer of each kind of head: made of the head, a reader of its context, and the end tokens."""


def load_head_proposer(checkpoint: Checkpoint, target: Loaded) -> Proposer:
    """The proposer of a head; the target's runner keeps the states that it reads from now on.

    Raises:
        CheckpointError: the head cannot be read.
        ModelError: it was trained for a model of another shape, or the runner keeps no states.
    """
    head = load_draft_head(checkpoint)
    config, runner = head.config, target.runner
    if config.vocabulary != runner.vocabulary:
        raise ModelError(
            f"{checkpoint.name} drafts for a vocabulary of {config.vocabulary}, {target.name} has "
            f"{runner.vocabulary}",
            hint="train a head for this model: attar distill MODEL -o HEAD --head KIND",
        )
    keep = getattr(runner, "keep_hidden", None)
    if keep is None:
        raise ModelError(f"{target.name}: its runner keeps no hidden states, which {checkpoint.name} reads")
    pool = keep(config.layers)
    if pool.states.shape[-1] != config.hidden:
        raise ModelError(
            f"{checkpoint.name} reads {config.hidden} channels, {target.name} has {pool.states.shape[-1]}"
        )
    context = ContextReader(pool, runner.block_size, config.layers)
    proposer: Proposer = PROPOSERS[config.kind](head, context, ends=target.ends)
    return proposer
