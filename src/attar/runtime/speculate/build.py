"""Makes a speculator from its settings: proposer, measured times, policy."""

from __future__ import annotations

import logging
from typing import Any, cast

from attar.checkpoint import open_checkpoint
from attar.checkpoint.draft_head import draft_head_of
from attar.models.draft_heads.kind import is_draft_head
from attar.runtime.kv.compose import FeatureRequests, check_together
from attar.runtime.loading import Loaded, load
from attar.runtime.speculate.combined import CombinedProposer
from attar.runtime.speculate.latency import Latency, by_tokens, measure
from attar.runtime.speculate.lookahead import LookaheadProposer
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import DraftTimes, Proposer, TimedProposer
from attar.runtime.speculate.settings import LOSSY, SpeculationSettings
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.speculate.suffix import SuffixProposer
from attar.runtime.speculate.verify import VerificationMode

FREE_DRAFTS = 40  # of a sequence in a pass at most, by default
logger = logging.getLogger(__name__)

SETTLE = 12  # plain passes before the first drafts


def make_speculator(
    settings: SpeculationSettings, target: Loaded, model: Any = None, **options: Any
) -> Speculator | None:
    """The speculator of a loaded model with an empty pool; None where none is configured.

    Args:
        model: what the target was loaded from; "self" reads it once more.
        options: of :func:`attar.runtime.loading.load`, for the draft model.

    Raises:
        SettingsError: the settings exclude a feature of the target.
        ModelError, CheckpointError: the draft model cannot be loaded, or does not suit the target.
    """
    if not settings:
        return None
    features = getattr(target.runner, "features", {})
    settings.check_with(features)
    layers_read(settings.draft, features)
    proposer = _proposer(settings, target, model, options)
    most, times = FREE_DRAFTS, DraftTimes({})
    if not proposer.is_free_of_compute:
        timed = cast(TimedProposer, proposer)
        most, times = timed.most, timed.times()
    most = settings.drafts or most
    passes = by_tokens(measure(target.runner))
    latency = Latency(passes, times.step, SETTLE, times.reading, times.begin, times.window)
    mode = cast("VerificationMode | None", settings.verification)
    if mode == LOSSY:
        logger.warning(
            "%s: typical acceptance is lossy: sampled completions are not the model's", target.name
        )
    chains = "states" in features
    return Speculator(proposer, DraftPolicy(latency, most), most=most, verification=mode, chains=chains)


def layers_read(draft: Any, features: FeatureRequests) -> tuple[int, ...]:
    """Layers of the target whose hidden states a draft reads: none, unless it is a head.

    Args:
        features: of the target, rows of ``kv/compose.py``.

    Raises:
        SettingsError: a feature does not go together with a head; names both settings.
        CheckpointError: the draft cannot be opened, or its config is damaged.
    """
    checkpoint = None if draft is None else open_checkpoint(draft)
    head = None if checkpoint is None else draft_head_of(checkpoint.config, checkpoint.tensors)
    if checkpoint is None or head is None:
        return ()
    check_together({**features, "hidden_states": ("draft", checkpoint.name)})
    return tuple(head["layers"] or ())


def _proposer(settings: SpeculationSettings, target: Loaded, model: Any, options: dict[str, Any]) -> Proposer:
    tokens = target.runner.capacity * target.runner.block_size
    if settings.draft is not None:
        head = _drafter(settings.draft, target, model, {**options, "kv_tokens": tokens})
        return CombinedProposer(head, SuffixProposer(ends=target.ends)) if settings.both else head
    if settings.speculate in ("ngram", "suffix"):
        return SuffixProposer(ends=target.ends, name=settings.speculate)
    if settings.speculate == "lookahead":
        return LookaheadProposer(ends=target.ends)
    if settings.speculate == "mtp":
        from attar.runtime.speculate.heads.mtp_proposer import load_mtp_proposer

        return load_mtp_proposer(target, model)
    from attar.runtime.speculate.self_speculation import load_self_draft

    return load_self_draft(model, target, kv_tokens=tokens)


def _drafter(draft: Any, target: Loaded, model: Any, options: dict[str, Any]) -> TimedProposer:
    """The proposer of a draft head or of a draft model."""
    if is_draft_head(open_checkpoint(draft)):
        from attar.runtime.speculate.heads.load import load_head_proposer

        return cast(TimedProposer, load_head_proposer(open_checkpoint(draft), target, model))
    from attar.runtime.speculate.self_speculation import draft_of

    return draft_of(load(draft, **options), target)
