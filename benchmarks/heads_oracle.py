"""``benchmarks/heads.py --parts oracle``: speed at a given acceptance, with the cost of each head really run.

The target is a Llama of random weights, 1.1 B in int4. Its greedy text is written once; then every pass
verifies K drafts, each of which is right with probability a if those before it are. Before each pass a head
of random weights for this target is run as it would be: hidden states are kept by the target's passes and
read, its context is written, its block or chain is drafted; what it drafts is dropped. K is each of
``--fixed``, and what the policy chooses of the ``--drafts`` that the head has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from decode_cases import llama_config, random_tensor, tensor_shapes
from heads_training import known_heads
from speculate_cases import Oracle
from speculate_pair import generated
from transformers import LlamaForCausalLM

from attar.checkpoint import open_checkpoint
from attar.checkpoint.hashing import identity
from attar.distillation.head_settings import HEAD_SETTINGS
from attar.distillation.heads import HEADS
from attar.measure.speculation.profile import FixedPolicy, profile
from attar.models.draft_heads.folder import save_draft_head
from attar.models.head import Head
from attar.progress import Terminal
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded
from attar.runtime.runner.compiled import Compiled
from attar.runtime.runner.compiled_weights import model_weights
from attar.runtime.speculate.build import SETTLE
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.heads.load import load_head_proposer
from attar.runtime.speculate.latency import Latency, by_tokens, measure
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest, Proposer
from attar.runtime.speculate.speculator import Speculator

CHOSEN = "chosen"


class HeadOracle(Oracle):
    """Drafts right tokens with a given probability, after a head has drafted.

    Args:
        head: run for every round; what it drafts is dropped.
    """

    confident, trees, branches = False, False, 1

    def __init__(
        self, head: Proposer, texts: Sequence[Sequence[int]], chance: float, vocabulary: int
    ) -> None:
        super().__init__(texts, chance, None, vocabulary)
        self.head, self.is_free_of_compute, self.name = head, False, f"{head.name}, a {chance}"

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self.head.propose(requests)
        return super().propose(requests)

    def observe(self, feedback: Sequence[DraftFeedback]) -> None:
        self.head.observe(feedback)

    def forget(self, sequence: int) -> None:
        self.head.forget(sequence)


def oracle(args: argparse.Namespace) -> str:
    """Tokens/s over plain decoding by head and acceptance."""
    lines = [
        f"a Llama of shape {args.shape}, random weights, int4 in groups of {args.group}, "
        f"{args.threads} threads, {args.drafts} drafts",
        "",
    ]
    columns = [
        "head",
        "a",
        "K",
        "tokens a pass",
        "a round of the head, ms",
        "plain, ms a token",
        "speedup",
        "95 %",
    ]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    names = [name for name in args.drafters or known_heads() if name in HEAD_SETTINGS]
    for name in names:
        cells = _cells(name, args)
        for cell in cells:
            numbers = [cell["tokens_per_pass"], cell["draft_ms"], cell["plain_ms"], cell["speedup"]]
            shown = " | ".join(f"{number:.2f}" for number in numbers)
            lines.append(
                f"| {name} | {cell['a']} | {cell['K']} | {shown} | {cell['low']:.2f} to {cell['high']:.2f} |"
            )
    return "\n".join(lines)


def _cells(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of a head, one for each acceptance; kept in WORK."""
    wanted = [
        args.shape,
        name,
        args.drafts,
        args.fixed,
        args.chances,
        args.tokens,
        args.prompts,
        args.rounds,
        args.vocabulary,
        args.group,
    ]
    file = args.work / f"oracle-{name}-{identity('heads-oracle', 2, {'wanted': wanted}, [])[:12]}.json"
    if file.exists() and name not in args.again:
        return list(json.loads(file.read_text()))
    if args.cached:
        return []
    runner = _target(args)
    loaded = Loaded(runner)
    llm = LLM.of(loaded)
    head = load_head_proposer(open_checkpoint(_random_head(name, args)), loaded)
    draws = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = torch.randint(
        1, runner.vocabulary, (args.prompts, 32), generator=draws
    ).tolist()
    texts = [prompt + generated(llm.engine, prompt, args.tokens) for prompt in prompts]
    passes, times = by_tokens(measure(runner)), head.times()
    methods = {}
    for chance in args.chances:
        proposer = HeadOracle(head, texts, chance, runner.vocabulary)
        for K in args.fixed:
            methods[f"{chance} {K}"] = Speculator(proposer, FixedPolicy(K), most=K)
        latency = Latency(passes, times.step, SETTLE, times.reading, times.begin)
        policy = DraftPolicy(latency, args.drafts)
        methods[f"{chance} {CHOSEN}"] = Speculator(proposer, policy, most=args.drafts)
    shown = profile(
        llm.engine,
        "target",
        methods,
        {"all": prompts},
        tokens=args.tokens,
        rounds=args.rounds,
        progress=Terminal(),
    )
    runner.close()
    plain, *rows = shown.rows
    cells = [
        {
            "a": row.method.split()[0],
            "K": row.method.split()[1],
            "tokens_per_pass": row.tokens_per_pass,
            "draft_ms": 1e3 * row.draft_share * (row.tokens_per_pass or 1.0) / row.tokens_per_s,
            "plain_ms": 1e3 / plain.tokens_per_s,
            "speedup": row.speedup,
            "low": row.low,
            "high": row.high,
        }
        for row in rows
    ]
    file.write_text(json.dumps(cells))
    return cells


def _target(args: argparse.Namespace) -> Compiled:
    config = llama_config(args.shape)
    weights = model_weights(
        config, tensor_shapes(config), random_tensor(config), weights="int4", group=args.group
    )
    return Compiled(weights, blocks=256, threads=args.threads)


def _random_head(name: str, args: argparse.Namespace) -> Path:
    """The folder of a head of random weights for the target; its layers have the target's shape."""
    folder: Path = args.work / f"random-{name}-{args.shape}-{args.drafts}-{args.vocabulary}"
    if (folder / "config.json").exists():
        return folder
    config = llama_config(args.shape)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
    own = Head(torch.randn(config.vocab_size, config.hidden_size) * config.hidden_size**-0.5)
    whole = name == "eagle"  # it drafts with its target's head
    size = 0 if whole else min(args.vocabulary, config.vocab_size)
    options = HEAD_SETTINGS[name](drafts=args.drafts, draft_vocabulary=size)
    if hasattr(options, "start"):
        options = replace(options, start="random")  # the target has no weights
    head = HEADS[name].make(model, own, options, None if whole else torch.arange(size))
    folder.mkdir(parents=True, exist_ok=True)
    save_draft_head(head, folder, target="random")
    return folder
