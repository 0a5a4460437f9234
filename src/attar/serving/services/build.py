"""Makes the parts of a service from a model and its settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from attar.runtime.admission import Limits
from attar.runtime.kv.compose import check_together, evicting
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded, load
from attar.runtime.pooling import FINAL, pooler_of
from attar.runtime.prefixes import check_store, open_store
from attar.runtime.speculate.build import SETTLE
from attar.runtime.speculate.draft_model import DraftModel
from attar.runtime.speculate.latency import Latency, by_tokens, measure
from attar.runtime.speculate.proposer import Proposer
from attar.runtime.speculate.self_speculation import vocabulary_of
from attar.runtime.speculate.settings import SpeculationSettings
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.speculate.suffix import SuffixProposer
from attar.runtime.speculate.verify import VerificationMode
from attar.runtime.speculate.vocabulary import SameVocabulary
from attar.serving.services.draft_service import DraftService
from attar.serving.services.drafter import DrafterPool
from attar.serving.services.messages import MOST_AHEAD, VERSION, Hello, Offer
from attar.serving.services.offer_proposer import OfferPolicy, OfferProposer
from attar.serving.services.offers import Outcome

PoolMaker = Callable[[Hello, Callable[[Offer], Outcome]], DrafterPool]
"""Own first message, and where offers go → the drafters."""
MOST_DRAFTS = 16  # of a sequence in a pass at most, by default


def tokenizer_digest(tokenizer: Any) -> str:
    """The same for two tokenizers with the same tokens and ids; empty without one."""
    if tokenizer is None:
        return ""
    tokens = sorted((int(id), str(token)) for token, id in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:32]


def hello_of(role: str, name: str, tokenizer: Any, vocabulary: int, context: int | None = None) -> Hello:
    """The first message of a service."""
    return Hello(
        version=VERSION,
        role=role,  # type: ignore[arg-type]
        name=name[:256],
        tokenizer=tokenizer_digest(tokenizer),
        vocabulary=vocabulary,
        context=context,
    )


def hello_of_model(role: str, loaded: Loaded) -> Hello:
    """The first message of a service with a model."""
    return hello_of(role, loaded.name, loaded.tokenizer, vocabulary_of(loaded), loaded.runner.context)


def load_with_offers(
    model: Any, pool: PoolMaker, options: Mapping[str, Any], embeddings: bool = False
) -> tuple[LLM, OfferProposer]:
    """A model whose drafts come from services.

    Args:
        options, embeddings: of :class:`attar.runtime.llm.LLM`.

    Raises:
        as :class:`attar.runtime.llm.LLM`.
    """
    speculation, load_options = _split(options)
    how: dict[str, tuple[str, Any]] = {"speculation": ("draft_endpoint", "given")}
    if embeddings:
        how["hidden_states"] = ("embeddings", True)
    check_together({**evicting(load_options.get("eviction")), **how})
    limits, prefix_cache = load_options.pop("limits", None), load_options.pop("prefix_cache", None)
    sequences = (limits or Limits()).sequences
    hidden = (FINAL,) if embeddings else ()
    store = load_options.pop("prefix_store", None)
    if store:
        check_store(store, prefix_cache, load_options, hidden)
    sizes = {"sequences": sequences, "prefix_cache": prefix_cache}
    loaded = load(model, **sizes, **load_options, hidden_layers=hidden)
    speculator = offer_speculator(loaded, pool, speculation.drafts, speculation.verification)
    llm = LLM.of(loaded, limits=limits, prefix_cache=prefix_cache, speculator=speculator)
    if store:
        llm.engine.scheduler.manager.store = open_store(store, loaded)
    if embeddings:
        llm.engine.pooler = pooler_of(loaded)
    return llm, cast(OfferProposer, speculator.proposer)


def offer_speculator(
    loaded: Loaded, pool: PoolMaker, drafts: int | None = None, verification: str | None = None
) -> Speculator:
    """The speculator of a loaded model with an empty pool.

    Drafts are drawn with the target's own noise, so verification is coupled unless the settings say
    otherwise.

    Raises:
        SettingsError: a feature of the runner excludes speculation.
    """
    features = getattr(loaded.runner, "features", {})
    check_together({**features, "speculation": ("draft_endpoint", "given")})
    most = min(drafts or MOST_DRAFTS, MOST_AHEAD)
    policy = OfferPolicy(Latency(by_tokens(measure(loaded.runner)), settle=SETTLE), most)
    proposer = OfferProposer(policy, vocabulary_of(loaded), most=most)
    proposer.pool = pool(hello_of_model("target", loaded), proposer.offer)
    mode = cast(VerificationMode, verification or "coupled")
    return Speculator(proposer, policy, most=most, verification=mode, prefilling=proposer.prefilling)


def load_draft_service(model: Any, options: Mapping[str, Any]) -> tuple[DraftService, Loaded]:
    """A service that drafts with a model, or with the suffix trees of what it reads.

    Raises:
        as :func:`attar.runtime.loading.load`.
    """
    speculation, load_options = _split(options)
    limits = load_options.pop("limits", None)
    for name in ("prefix_cache", "prefix_store"):
        load_options.pop(name, None)
    loaded = load(model, **load_options)
    proposer: Proposer
    vocabulary = vocabulary_of(loaded)
    if speculation.speculate:
        proposer = SuffixProposer(ends=loaded.ends, name=speculation.speculate)
    else:
        mapping = SameVocabulary(loaded.runner.vocabulary, vocabulary)
        proposer = DraftModel(loaded.runner, mapping, name=loaded.name, ends=loaded.ends)
    batch = 64 if limits is None else limits.sequences
    context = loaded.runner.context
    return DraftService(proposer, vocabulary=vocabulary, batch=batch, context=context), loaded


def _split(options: Mapping[str, Any]) -> tuple[SpeculationSettings, dict[str, Any]]:
    """Settings of speculation, and all others."""
    names = ("speculate", "draft", "drafts", "verification")
    speculation = SpeculationSettings(**{name: options.get(name) for name in names})
    return speculation, {name: value for name, value in options.items() if name not in names}
