"""The law of texts of models that carry states, exactly: every draft, coin and draw of several steps is
taken, so that behind all drafts that were rejected the states must be those of the tokens that stay."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from attar.runtime.runner.compiled import compiled
from attar.runtime.runner.modules import Modules
from attar.runtime.speculate.chain import block
from attar.runtime.step import StepInput, TokenSpan
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.runtime.speculate.laws import Shape, outcomes, plain_law, random_model, total_variation

V, LENGTH, BLOCKS = 3, 3, 2000
PROMPT = [2, 0, 1, 1]
SIZE = {"vocab_size": V, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
LAYERS = {"qwen3_5": ["linear_attention", "full_attention"], "lfm2": ["conv", "full_attention"]}


@dataclass
class Branch:
    """A text behind the prompt, with the chance that it came to this; its last token has not been run."""

    sequence: int
    text: tuple[int, ...]
    odds: float


class Enumeration:
    """Runs all branches of a step together, each in a block and a sequence of its own.

    Args:
        shape: of every step's drafts.
    """

    def __init__(self, runner, q, shape):
        self.runner, self.q, self.shape, self.count = runner, q, shape, 1
        runner.run(StepInput(PROMPT[:-1], (TokenSpan(0, 0, len(PROMPT) - 1, (0,), 1),)))

    def law(self):
        """Of the first LENGTH tokens: (V,) * LENGTH."""
        law, branches = np.zeros((V,) * LENGTH), [Branch(0, (), 1.0)]
        while branches:
            pairs = [(branch, *draft) for branch in branches for draft in self.drafts(branch)]
            branches = []
            for (branch, draft, odds), (child, p) in zip(pairs, self.step(pairs), strict=True):
                ends = outcomes(lambda c, d=draft, p=p: block(d, p.__getitem__, c).tokens(d))
                for tokens, chance in ends.items():
                    text, total = branch.text + tuple(tokens), branch.odds * odds * chance
                    if len(text) >= LENGTH:
                        law[text[:LENGTH]] += total
                    else:
                        branches.append(Branch(child, text, total))
        return law

    def drafts(self, branch):
        return self.shape.drafts(lambda prefix: self.q((*branch.text, *prefix)))

    def step(self, pairs):
        """The sequence of each pair, and p (nodes, V)."""
        tokens, spans, copies = [], [], []
        for branch, draft, _ in pairs:
            start, child = len(PROMPT) + len(branch.text) - 1, self.count
            self.count += 1
            self.runner.fork(branch.sequence, child)
            copies.append((branch.sequence, child))
            tokens += [(*PROMPT, *branch.text)[-1], *draft.tokens]
            stop, drafts = start + 1 + len(draft.tokens), len(draft.tokens)
            spans.append(TokenSpan(child, start, stop, (child,), 1 + drafts, drafts=drafts))
        logits = self.runner.run(StepInput(tokens, tuple(spans), tuple(copies)))
        rows = torch.softmax(logits.double(), -1).numpy().reshape(len(pairs), -1, V)
        return [(span.sequence, p) for span, p in zip(spans, rows, strict=True)]


def make(name):
    family, _, kind = name.partition(" ")
    layers = {"layer_types": LAYERS[family]} if family in LAYERS else {}
    model = tiny_models.build(family, **SIZE, **layers)
    if not kind:
        return Modules(model, blocks=BLOCKS, block_size=16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return compiled(model.config, model.state_dict(), blocks=BLOCKS, threads=1, kv_dtype="float32")


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        pytest.param("qwen3_5 compiled", 1e-12, marks=needs_compiler),  # bit by bit as without drafts
        pytest.param("mamba2 compiled", 1e-12, marks=(needs_compiler, pytest.mark.slow)),
        pytest.param("qwen3_5", 1e-5, marks=pytest.mark.slow),
        pytest.param("lfm2", 1e-5, marks=pytest.mark.slow),
    ],
)
def test_texts_of_a_hybrid_have_the_law_without_drafts(name, exact):
    q, runner = random_model(V, 1, spread=0.5), make(name)
    alone = Enumeration(runner, q, Shape((), "iid"))

    def plain(text):
        runner.fork(0, 1)
        tokens = [*PROMPT[-1:], *text]
        span = TokenSpan(1, len(PROMPT) - 1, len(PROMPT) + len(text), (1,), 1)
        return torch.softmax(runner.run(StepInput(tokens, (span,), ((0, 1),))).double(), -1)[0].numpy()

    want = plain_law(plain, LENGTH)
    assert total_variation(alone.law(), want) < exact
    law = Enumeration(runner, q, Shape((0, 1), "iid")).law()
    assert total_variation(law, want) < exact
