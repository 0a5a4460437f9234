"""A draft head from its folder, joined to the runner of its target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

from attar.checkpoint import open_checkpoint
from attar.checkpoint.card import Parent
from attar.checkpoint.open import Checkpoint
from attar.errors import ModelError
from attar.models.draft_heads.content import head_target
from attar.models.draft_heads.folder import load_draft_head
from attar.runtime.loading import Loaded
from attar.runtime.runner.compiled import Compiled
from attar.runtime.speculate.heads.block_proposer import block_head
from attar.runtime.speculate.heads.chain import ChainProposer
from attar.runtime.speculate.heads.compiled_block import compiled_block_head
from attar.runtime.speculate.heads.context import WINDOW, ContextReader
from attar.runtime.speculate.heads.eagle_proposer import EagleChain, EagleDrafter
from attar.runtime.speculate.heads.eagle_tree import EagleTreeProposer
from attar.runtime.speculate.heads.medusa_proposer import MedusaProposer
from attar.runtime.speculate.heads.own_tensors import own_tensors
from attar.runtime.speculate.proposer import Proposer

logger = logging.getLogger(__name__)


def _medusa(head: Any, context: ContextReader, target: Loaded) -> Proposer:
    return MedusaProposer(head, context, ends=target.ends)


def _eagle(head: Any, context: ContextReader, target: Loaded) -> Proposer:
    drafter, config = EagleDrafter(head, own_tensors(target.runner, target.name)), head.config
    if config.branches > 1:
        named = {"name": config.kind, "ends": target.ends}
        return EagleTreeProposer(drafter, context, width=config.branches, **named)
    return ChainProposer(EagleChain(drafter), context, name=config.kind, ends=target.ends)


def _block(head: Any, context: ContextReader, target: Loaded) -> Proposer:
    target_tensors, runner = own_tensors(target.runner, target.name), target.runner
    compiled = compiled_block_head(head, target_tensors, runner) if isinstance(runner, Compiled) else None
    chain = compiled or block_head(head, target_tensors)
    return ChainProposer(chain, context, name=head.config.kind, ends=target.ends)


PROPOSERS: dict[str, Callable[[Any, ContextReader, Loaded], Proposer]] = {
    "medusa": _medusa,
    "eagle": _eagle,
    "eagle3": _eagle,
    "dflash": _block,
    "dspark": _block,
}
"""The proposer of each kind of head: made of the head, a reader of its context, and the target, whose own
embedding and head it may share (``own_tensors.py``)."""


def load_head_proposer(checkpoint: Checkpoint, target: Loaded, model: Any = None) -> Proposer:
    """The proposer of a head; the target's runner keeps the states that it reads from now on.

    Args:
        model: what the target was loaded from; a warning is logged where the head was trained for another.

    Raises:
        CheckpointError: the head cannot be read.
        ModelError: it was trained for a model of another shape, or the runner keeps no states.
    """
    head = load_draft_head(checkpoint, None if model is None else head_target(open_checkpoint(model)))
    config, runner = head.config, target.runner
    if config.vocabulary != runner.vocabulary:
        raise ModelError(
            f"{checkpoint.name} drafts for a vocabulary of {config.vocabulary}, {target.name} has "
            f"{runner.vocabulary}",
            hint="train a head for this model: attar train-head MODEL -o HEAD --head KIND",
        )
    keep = getattr(runner, "keep_hidden", None)
    if keep is None:
        raise ModelError(f"{target.name}: its runner keeps no hidden states, which {checkpoint.name} reads")
    pool = keep(config.layers)
    if pool.states.shape[-1] != config.hidden:
        raise ModelError(
            f"{checkpoint.name} reads {config.hidden} channels, {target.name} has {pool.states.shape[-1]}"
        )
    context = ContextReader(pool, runner.block_size, config.layers, WINDOW)
    if model is not None and not trained_for(checkpoint, open_checkpoint(model)):
        logger.warning(
            "%s was trained for another model than %s: few of its drafts will be accepted",
            checkpoint.name,
            target.name,
        )
    proposer = PROPOSERS[config.kind](head.to(pool.states.device), context, target)
    cast(Any, proposer).name = f"{checkpoint.name} ({config.kind})"
    return proposer


def trained_for(head: Checkpoint, model: Checkpoint) -> bool:
    """Whether a head's card names the model, or one that the model was made of (its quantized copy keeps most
    of the head's acceptance); a head without a card is taken as it is."""
    parents = head.card.parents if head.card is not None else ()
    known = {parent.fingerprint for parent in parents} | set(_fingerprints(parents))
    known.discard("")
    if not known:
        return True
    ancestors = set(_fingerprints(model.card.parents)) if model.card is not None else set()
    return bool(known & ancestors) or model.fingerprint() in known


def _fingerprints(parents: tuple[Parent, ...]) -> Iterator[str]:
    """Of all ancestors by weights."""
    for parent in parents:
        if parent.role == "weights":
            yield parent.fingerprint
            yield from _fingerprints(parent.parents)
