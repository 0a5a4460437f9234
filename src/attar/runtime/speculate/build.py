"""Makes a speculator from its settings: proposer, measured times, policy."""

from __future__ import annotations

from typing import Any, cast

from attar.runtime.loading import Loaded, load
from attar.runtime.speculate.latency import Latency, by_tokens, measure
from attar.runtime.speculate.lookahead import LookaheadProposer
from attar.runtime.speculate.ngram import NgramProposer, SharedNgrams
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import Proposer
from attar.runtime.speculate.settings import SpeculationSettings
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.speculate.verify import VerificationMode

FREE, MODEL = 40, 8  # drafts of one sequence in a pass at most, by default
READ = 64  # tokens of a prompt, to measure how fast a draft model reads
SETTLE = 12  # plain passes before the first drafts


def make_speculator(
    wanted: SpeculationSettings, target: Loaded, model: Any = None, **settings: Any
) -> Speculator | None:
    """The speculator of a loaded model with an empty pool; None where none is configured.

    Args:
        model: what the target was loaded from; "self" reads it once more.
        settings: that the draft model is loaded with, of :func:`attar.runtime.loading.load`.

    Raises:
        SettingsError: it does not go together with what the target does.
        ModelError, CheckpointError: the draft model cannot be loaded, or does not suit the target.
    """
    if not wanted:
        return None
    wanted.check_with(getattr(target.runner, "features", {}))
    proposer = _proposer(wanted, target, model, settings)
    most = wanted.drafts or (FREE if proposer.free else MODEL)
    drafting, reading = {}, 0.0
    if not proposer.free:
        times = measure(cast(Any, proposer).runner, {1: (1, READ), 8: (8,)})
        drafting = {batch: points[batch] for batch, points in times.items()}
        reading = times[1].get(READ, READ * times[1][1]) / READ
    latency = Latency(by_tokens(measure(target.runner)), drafting, SETTLE, reading)
    mode = cast("VerificationMode | None", wanted.verification)
    return Speculator(proposer, DraftPolicy(latency, most), most=most, verification=mode)


def _proposer(wanted: SpeculationSettings, target: Loaded, model: Any, settings: dict[str, Any]) -> Proposer:
    if wanted.speculate == "ngram":
        return NgramProposer(ends=target.ends, shared=SharedNgrams())
    if wanted.speculate == "lookahead":
        return LookaheadProposer(ends=target.ends)
    from attar.runtime.speculate.self_speculation import draft_of, load_self_draft

    tokens = target.runner.capacity * target.runner.block_size
    if wanted.speculate == "self":
        return load_self_draft(model, target, kv_tokens=tokens)
    return draft_of(load(wanted.draft, kv_tokens=tokens, **settings), target)
