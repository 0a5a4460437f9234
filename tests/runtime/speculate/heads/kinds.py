"""Every kind of trained proposer with random weights, made as attar makes it, alone and with suffix trees.

head_of_kind    the modules, for a model
proposer_of     its proposer, by the table that a folder's head is loaded with
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attar.distillation.head_settings import HEAD_SETTINGS
from attar.distillation.heads import HEADS
from attar.models.draft_heads.static_tree import Paths
from attar.models.head import head_of
from attar.runtime.loading import Loaded
from attar.runtime.speculate.combined import CombinedProposer
from attar.runtime.speculate.heads.context import ContextReader
from attar.runtime.speculate.heads.load import PROPOSERS
from attar.runtime.speculate.suffix import SuffixProposer
from tests import tiny_models

TREE: Paths = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))  # of Medusa


@dataclass(frozen=True)
class KindCase:
    """A kind of head and its options; no kind: suffix trees alone."""

    kind: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    tree: Paths = ()
    suffix: bool = False


TREES = {
    "medusa tree": KindCase("medusa", tree=TREE),
    "eagle tree": KindCase("eagle", {"branches": 2}),
    "eagle3 tree": KindCase("eagle3", {"branches": 2}),
}
CHAINS = {
    "medusa": KindCase("medusa"),
    "eagle": KindCase("eagle"),
    "eagle3": KindCase("eagle3", {"norms": "3.1"}),
    "dflash": KindCase("dflash", {"context_layers": 2}),
    "dspark without confidence": KindCase("dspark", {"context_layers": 2, "confidence": 0.0}),
    "dspark": KindCase("dspark", {"context_layers": 2}),
}
OTHER_MARKOV = {
    "dspark gated": KindCase("dspark", {"context_layers": 2, "markov": "gated"}),
    "dspark rnn": KindCase("dspark", {"context_layers": 2, "markov": "rnn"}),
}
SUFFIX = {"suffix": KindCase(suffix=True)}
BOTH = {
    f"{name} and suffix": replace({**CHAINS, **TREES}[name], suffix=True)
    for name in ("medusa tree", "eagle3 tree", "dspark")
}
EVERY = {**CHAINS, **TREES, **SUFFIX, **BOTH}


def head_of_kind(
    case: KindCase,
    model: Any,
    *,
    drafts: int = 3,
    chosen: torch.Tensor | None = None,
    seed: int | None = 0,
) -> Any:
    """Modules in the sizes that ``attar train-head --head`` chooses.

    Args:
        chosen: the tokens of a reduced vocabulary; None: all.
        seed: of random weights; None: those that a training begins with.
    """
    options = {"drafts": drafts, **case.options}
    settings = HEAD_SETTINGS[case.kind](**options)
    with torch.random.fork_rng():
        torch.manual_seed(seed or 0)
        head = HEADS[case.kind].make(model, head_of(model), settings, chosen)
    head.eval().requires_grad_(False)
    if seed is not None:
        tiny_models.randomize(head, seed)
    if case.tree:
        head.config = replace(head.config, tree=case.tree)
    if case.options.get("confidence", 1.0) and case.kind == "dspark":
        head.confidence_head.proj.weight.mul_(1.5)
        head.confidence_head.proj.bias.fill_(1.0)  # some drafts end, and some do not
    return head


def proposer_of(case: KindCase, head: Any, runner: Any, reader: Any = None) -> Any:
    """The proposer of a case.

    Args:
        head: of ``head_of_kind``; None where the case has no kind.
        reader: makes what stands for the reader of the runner's states, of layers; None: its own.
    """
    if not case.kind:
        return SuffixProposer()
    layers = head.config.layers
    if reader is None:
        context = ContextReader(runner.keep_hidden(layers), runner.block_size, layers)
    else:
        context = reader(layers)
    proposer: Any = PROPOSERS[case.kind](head, context, Loaded(runner))
    return CombinedProposer(proposer, SuffixProposer()) if case.suffix else proposer
