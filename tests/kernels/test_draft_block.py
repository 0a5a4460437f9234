"""A block of drafts in the compiled library against loops in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from attar.kernels.decode import LayerWeights, ModelWeights
from attar.kernels.draft_block import DrafterWeights, DraftProgram, DraftSpan
from attar.kernels.packed import pack, unpack
from attar.runtime.sampling.sample import draw, noise_key
from tests.compiler import needs_compiler

pytestmark = needs_compiler

H, HEADS, KV, DIM, WIDE, LAYERS, TAPS = 64, 4, 2, 16, 96, 2, 3
V, REDUCED, RANK, BLOCK, CONTEXT, EPS = 90, 50, 16, 7, 400, 1e-5
EXACT = {"kv_dtype": "float32", "bits": 16}


def normal(*shape, seed=0, size=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size


def rotary_table():
    f = 1.0 / 10000.0 ** (torch.arange(0, DIM, 2).float() / DIM)
    angles = torch.arange(CONTEXT).float()[:, None] * f
    return torch.cat([angles.cos(), angles.sin()], 1).contiguous()


def drafter(kind="bf16", *, skipped=0, reduced=True, markov=True, confidence=True, head_norms=True):
    rotary, seeds = rotary_table(), iter(range(100, 999))

    def weight(rows, columns):
        return pack(normal(rows, columns, seed=next(seeds), size=1.5 * columns**-0.5), kind, group=16)

    def norm(size):
        return 1 + 0.2 * normal(size, seed=next(seeds))

    layers = tuple(
        LayerWeights(
            before_attention=norm(H),
            before_mlp=norm(H),
            qkv=weight((HEADS + 2 * KV) * DIM, H),
            out=weight(H, HEADS * DIM),
            gate_up=weight(2 * WIDE, H),
            down=weight(H, WIDE),
            rotary=rotary,
            query_norm=norm(DIM) if head_norms else None,
            key_norm=norm(DIM) if head_norms else None,
        )
        for _ in range(LAYERS)
    )
    size = REDUCED if reduced else V
    model = ModelWeights(
        embedding=normal(V, H, seed=1).bfloat16(),
        norm=norm(H),
        head=weight(size, H),
        layers=layers,
        heads=HEADS,
        kv_heads=KV,
        head_dim=DIM,
        eps=EPS,
        scale=DIM**-0.5,
        mask=normal(H, seed=6),
    )
    drafts, rank = BLOCK - skipped, RANK if markov else 0
    return DrafterWeights(
        model=model,
        context=weight(H, TAPS * H),
        context_norm=norm(H),
        drafts=drafts,
        skipped=skipped,
        chosen=torch.randperm(V, generator=torch.Generator().manual_seed(5))[:REDUCED].sort()[0]
        if reduced
        else None,
        previous=normal(V, RANK, seed=2).bfloat16() if markov else None,
        markov=pack(normal(size, RANK, seed=3, size=0.5), kind, group=16) if markov else None,
        confidence=normal(H + rank + 1, seed=4, size=0.3) if confidence else None,
        calibration=torch.linspace(0.7, 1.6, drafts) if confidence else None,
    )


def rms(x, weight):
    return x / ((x * x).mean() + EPS) ** 0.5 * weight.double()


def rotated(x, position):
    half = DIM // 2
    angles = [position * 10000.0 ** (-2 * i / DIM) for i in range(half)]
    out = x.clone()
    for i, angle in enumerate(angles):
        a, b, c, s = x[i], x[i + half], np.cos(angle), np.sin(angle)
        out[i], out[i + half] = a * c - b * s, b * c + a * s
    return out


class Reference:
    """One block at a time, float64."""

    def __init__(self, weights):
        self.weights, self.model = weights, weights.model
        self.dense = {}

    def matrix(self, packed):
        if id(packed) not in self.dense:
            self.dense[id(packed)] = unpack(packed).double()
        return self.dense[id(packed)]

    def head_norm(self, x, weight):
        return x if weight is None else rms(x, weight)

    def heads(self, layer, x, position):
        """Queries, keys and values of one row."""
        qkv = self.matrix(layer.qkv) @ x
        parts = qkv.view(-1, DIM)
        q = [rotated(self.head_norm(part, layer.query_norm), position) for part in parts[:HEADS]]
        k = [rotated(self.head_norm(part, layer.key_norm), position) for part in parts[HEADS : HEADS + KV]]
        return q, k, list(parts[HEADS + KV :])

    def hidden(self, last, position, states):
        """(B, H) before the final norm; states (n, m H) of positions [0, n)."""
        w = self.weights
        context = [rms(self.matrix(w.context) @ row, w.context_norm) for row in states.double()]
        x = [self.model.embedding[last].double()] + [self.model.mask.double()] * (w.block - 1)
        for layer in self.model.layers:
            past = [self.heads(layer, row, at)[1:] for at, row in enumerate(context)]
            own = [
                self.heads(layer, rms(row, layer.before_attention), position + at) for at, row in enumerate(x)
            ]
            for at, row in enumerate(x):
                mixed = []
                for head in range(HEADS):
                    group = head * KV // HEADS
                    keys = [k[group] for k, _ in past] + [k[group] for _, k, _ in own]
                    values = [v[group] for _, v in past] + [v[group] for _, _, v in own]
                    scores = torch.stack([own[at][0][head] @ key for key in keys]) * DIM**-0.5
                    p = scores.softmax(0)
                    mixed.append(sum(p[j] * value for j, value in enumerate(values)))
                x[at] = row + self.matrix(layer.out) @ torch.cat(mixed)
            for at, row in enumerate(x):
                gate, up = (self.matrix(layer.gate_up) @ rms(row, layer.before_mlp)).chunk(2)
                x[at] = x[at] + self.matrix(layer.down) @ (gate / (1 + torch.exp(-gate)) * up)
        return torch.stack(x)

    def draft(self, last, position, states, most, least=0.0):
        """Tokens, logits and survivals of the likeliest chain."""
        w, hidden = self.weights, self.hidden(last, position, states)
        previous, tokens, rows, survivals, survival = last, [], [], [], 1.0
        for k in range(most):
            h = rms(hidden[k + w.skipped], self.model.norm)
            z, parts = self.matrix(self.model.head) @ h, [h]
            if w.markov is not None:
                before = w.previous[previous].double()
                z = z + self.matrix(w.markov) @ before
                parts.append(before)
            if w.confidence is not None:
                score = w.confidence[:-1].double() @ torch.cat(parts) + float(w.confidence[-1])
                survival *= float(torch.sigmoid(score / float(w.calibration[k])))
                if survival < least:
                    break
            survivals.append(survival)
            rows.append(z)
            best = int(z.argmax())
            previous = best if w.chosen is None else int(w.chosen[best])
            tokens.append(previous)
        return tokens, rows, survivals


def spans_of(program, lengths, seed=0, **more):
    """Sequences of these lengths with their context written, in tables of their own."""
    spans, all_states, blocks = [], [], iter(torch.randperm(program.blocks).tolist())
    for row, n in enumerate(lengths):
        states = normal(n - 1, TAPS * H, seed=seed + row)
        table = [next(blocks) for _ in range(-(-(n - 1 + BLOCK) // program.block_size))]
        entries = np.arange(n - 1)
        slots = np.asarray(table)[entries // program.block_size] * program.block_size
        program.write_context(states, entries, slots + entries % program.block_size)
        spans.append(DraftSpan(last=3 + row, position=n - 1, past=n - 1, table=table, most=BLOCK, **more))
        all_states.append(states)
    return spans, all_states


def check(weights, lengths, *, tolerance=2e-4, threads=2, **settings):
    program = DraftProgram(weights, 48, threads=threads, **{**EXACT, **settings})
    spans, states = spans_of(program, lengths)
    drafted, reference = program.draft(spans), Reference(weights)
    for row, span in enumerate(spans):
        tokens, logits, survivals = reference.draft(span.last, span.position, states[row], weights.drafts)
        torch.testing.assert_close(drafted.logits[row].double(), torch.stack(logits), rtol=0, atol=tolerance)
        assert drafted.counts[row] == weights.drafts
        assert drafted.tokens[row].tolist() == tokens
        if survivals and weights.confidence is not None:
            np.testing.assert_allclose(drafted.survival[row], survivals, atol=tolerance)
    program.close()


@pytest.mark.few(2)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"skipped": 1, "markov": False, "confidence": False, "reduced": False},
        {"head_norms": False, "confidence": False},
        {"markov": False},
    ],
)
def test_blocks_equal_the_reference(parts, threads):
    check(drafter(**parts), [1, 2, 23], threads=threads)


def test_states_and_logits_without_the_markov_head():
    weights = drafter()
    program = DraftProgram(weights, 48, threads=2, **EXACT)
    spans, all_states = spans_of(program, [1, 23])
    logits, states = program.states(spans)
    reference = Reference(dataclasses.replace(weights, previous=None, markov=None, confidence=None))
    for row, span in enumerate(spans):
        hidden = reference.hidden(span.last, span.position, all_states[row])
        normed = torch.stack([rms(x, weights.model.norm) for x in hidden])
        torch.testing.assert_close(states[row].double(), normed, rtol=0, atol=2e-4)
        rows = reference.draft(span.last, span.position, all_states[row], BLOCK)[1]
        torch.testing.assert_close(logits[row].double(), torch.stack(rows), rtol=0, atol=2e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_packed_weights(kind):
    check(drafter(kind), [19], tolerance=5e-3)


@pytest.mark.slow
def test_a_context_of_several_splits():
    """Attention is divided among workers: its parts are merged."""
    check(drafter(), [301], threads=2)


def test_context_in_parts_is_the_context_at_once():
    weights = drafter()
    program = DraftProgram(weights, 48, threads=2, **EXACT)
    (span,), (states,) = spans_of(program, [40])
    expected = program.draft([span]).logits.clone()
    program.pool.zero_()
    entries = np.arange(39)
    slots = np.asarray(span.table)[entries // 16] * 16 + entries % 16
    for a, b in [(0, 1), (1, 17), (17, 39)]:
        program.write_context(states[a:b], entries[a:b], slots[a:b])
    assert torch.equal(program.draft([span]).logits, expected)


def test_a_round_leaves_no_trace_in_the_context():
    weights = drafter()
    program = DraftProgram(weights, 48, threads=1, **EXACT)
    spans, _ = spans_of(program, [20, 33])
    first = program.draft(spans)
    again = program.draft(spans[1:])
    assert torch.equal(first.logits[1], again.logits[0])
    assert first.tokens[1].tolist() == again.tokens[0].tolist()


def test_fewer_drafts_than_a_block():
    weights = drafter()
    program = DraftProgram(weights, 48, threads=2, **EXACT)
    spans, _ = spans_of(program, [20, 33])
    full = program.draft(spans)
    short = program.draft(
        [dataclasses.replace(span, most=most) for span, most in zip(spans, (2, 4), strict=True)]
    )
    assert short.counts.tolist() == [2, 4]
    assert short.tokens[1].tolist() == full.tokens[1, :4].tolist()
    assert short.tokens[0, :2].tolist() == full.tokens[0, :2].tolist()
    assert torch.equal(short.logits[1], full.logits[1, :4])


def test_a_draft_ends_where_its_survival_does_not_pay():
    weights = drafter()
    program = DraftProgram(weights, 48, threads=2, **EXACT)
    spans, states = spans_of(program, [20])
    survivals = Reference(weights).draft(spans[0].last, 19, states[0], BLOCK)[2]
    for kept in range(1, BLOCK):
        least = (survivals[kept - 1] + survivals[kept]) / 2
        drafted = program.draft([dataclasses.replace(spans[0], least=[least] * BLOCK)])
        assert drafted.counts[0] == kept
        only = [0.0] * kept + [1.0] + [0.0] * (BLOCK - kept - 1)  # of one draft alone
        assert program.draft([dataclasses.replace(spans[0], least=only)]).counts[0] == kept


def test_blocks_of_a_round_end_by_themselves():
    """A chain that ended is not drafted for any more; the others go on, to the same tokens."""
    weights = drafter()
    program = DraftProgram(weights, 48, threads=2, **EXACT)
    spans, _ = spans_of(program, [20, 7, 33])
    full = program.draft(spans)
    ends = [1, BLOCK, 2]
    least = [[0.0] * end + [2.0] * (BLOCK - end) for end in ends]
    drafted = program.draft(
        [dataclasses.replace(span, least=one) for span, one in zip(spans, least, strict=True)]
    )
    assert drafted.counts.tolist() == ends
    for row, end in enumerate(ends):
        assert drafted.tokens[row, :end].tolist() == full.tokens[row, :end].tolist()
        assert drafted.survival[row, :end].tolist() == full.survival[row, :end].tolist()


@pytest.mark.parametrize("reduced", [True, False])
def test_draws_are_those_of_sampling(reduced):
    """The same noise as the target's tokens, by the target's ids, along the drafted path."""
    weights = drafter(reduced=reduced)
    program = DraftProgram(weights, 48, threads=2, **EXACT)
    spans, _ = spans_of(program, [20])
    changed = 0
    for seed in range(60):
        keys, T = [noise_key(seed, 0, 20 + k) for k in range(BLOCK)], 0.5 + seed / 20
        span = dataclasses.replace(spans[0], temperature=T, keys=keys)
        drafted = program.draft([span])
        logits = torch.full((BLOCK, V), -torch.inf)
        ids = torch.arange(V) if weights.chosen is None else weights.chosen
        logits[:, ids] = drafted.logits[0]
        expected = draw((logits / T).softmax(-1), keys)
        assert drafted.tokens[0].tolist() == expected
        changed += expected != program.draft(spans).tokens[0].tolist()
    assert changed > 30


def test_numbers_that_are_not_finite_end_a_draft():
    weights = drafter(confidence=False)
    program = DraftProgram(weights, 48, threads=2, **EXACT)
    spans, states = spans_of(program, [5])
    entries = np.arange(4)
    slots = np.asarray(spans[0].table)[0] * 16 + entries
    program.write_context(states[0] * torch.nan, entries, slots)
    assert program.draft(spans).counts.tolist() == [0]


def test_threads_of_another_program():
    weights = drafter()
    target = DraftProgram(weights, 48, threads=2, **EXACT)
    drafts = DraftProgram(weights, 48, threads_of=target, **EXACT)
    assert drafts.threads == 2
    spans, _ = spans_of(target, [20])
    drafts.pool.copy_(target.pool)
    target.close()
    assert drafts.draft(spans).tokens.shape == (1, BLOCK)
