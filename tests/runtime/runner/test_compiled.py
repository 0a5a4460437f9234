"""The compiled and the device runner against transformers in float32: logits and greedy tokens, however the
tokens come."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from attar.errors import ModelError, UsageError
from attar.runtime.runner.compiled import Compiled, compiled
from attar.runtime.runner.compiled_weights import model_weights
from attar.runtime.runner.device.runner import device_runner as device
from attar.runtime.step import StepInput, TokenSpan, ancestors
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.marks import slow_but

pytestmark = needs_compiler

FAMILIES = ("llama2", "llama3", "smollm", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
EXACT = {"kv_dtype": "float32", "bits": 16}
LENGTH = 40
CLOSE = {"rtol": 0, "atol": 2e-4}


@pytest.fixture(scope="module")
def models():
    """Models by family, weights rounded to bfloat16 (but norms and embeddings' use stay float32)."""
    result = {}

    def get(family, **changes):
        key = (family, *sorted(changes.items()))
        if key not in result:
            model = tiny_models.build(family, **changes)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.bfloat16().float())
            result[key] = model
        return result[key]

    return get


@pytest.fixture(autouse=True, params=slow_but(("compiled", "device"), "compiled"))
def made(request, monkeypatch):
    """What ``runner`` makes: the device runner has the same tests. It has no threads, and its activations
    are float32."""
    monkeypatch.setitem(globals(), "MAKE", RUNNERS[request.param])
    return request.param


def compiled_runner(model, **settings):
    given = {"blocks": 24, "threads": 2, **EXACT, **settings}
    return compiled(model.config, model.state_dict(), **given)


def device_runner(model, **settings):
    given = {"blocks": 24, "kv_dtype": "float32", **settings}
    given.pop("threads", None), given.pop("bits", None)
    return device(model.config, model.state_dict(), **given)


RUNNERS = {"compiled": compiled_runner, "device": device_runner}
MAKE = compiled_runner


def runner(model, **settings):
    return MAKE(model, **settings)


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


def tokens(length=LENGTH, seed=0):
    return torch.randint(
        2, tiny_models.VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def step(*parts, copies=(), parents=None):
    """A step of (sequence, ids, start, stop, blocks, wants)."""
    ids, spans = [], []
    for sequence, all_ids, start, stop, blocks, wants in parts:
        ids += all_ids[start:stop]
        spans.append(TokenSpan(sequence, start, stop, tuple(blocks), wants))
    return StepInput(ids, tuple(spans), copies, parents)


def run(compiled_runner, *parts, **more):
    result = step(*parts, **more)
    result.check(compiled_runner.block_size, compiled_runner.capacity)
    return compiled_runner.run(result)


@pytest.mark.few(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family(family, models):
    model, ids = models(family), tokens()
    result = run(runner(model), (0, ids, 0, LENGTH, [5, 2, 9], LENGTH))
    torch.testing.assert_close(result, logits_of(model, ids), **CLOSE)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_chunks_and_single_tokens(threads, models):
    for family in ("llama3", "mistral", "gemma2"):
        model, ids = models(family), tokens()
        actual, blocks = runner(model, threads=threads), [7, 1, 4]
        cuts = [0, 3, 19, 20, 21, 22, 35, LENGTH]
        rows = [run(actual, (0, ids, a, b, blocks, b - a)) for a, b in itertools.pairwise(cuts)]
        torch.testing.assert_close(torch.cat(rows), logits_of(model, ids), **CLOSE)


def test_sequences_in_one_step(models):
    model, first, second, third = models("llama3"), tokens(seed=1), tokens(seed=2), tokens(seed=3)
    model_runner = runner(model)
    run(model_runner, (1, first, 0, 20, [0, 1], 0), (2, second, 0, 7, [2], 1))
    rows = run(
        model_runner,
        (2, second, 7, 8, [2], 1),
        (3, third, 0, 30, [10, 3], 2),
        (1, first, 20, 21, [0, 1], 1),
    )
    expected = [logits_of(model, second)[7:8], logits_of(model, third)[28:30], logits_of(model, first)[20:21]]
    torch.testing.assert_close(rows, torch.cat(expected), **CLOSE)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weights": "int4", "kv_dtype": "bfloat16"},
        {"weights": "int4", "kv_dtype": "bfloat16", "bits": 8},
        {"kv_dtype": "bfloat16", "bits": 8},
        {"weights": "int4", "kv_dtype": "int4"},
    ],
)
def test_a_token_does_not_depend_on_its_batch(settings, models):
    """Bit by bit: alone or with others, in one chunk or in several, with any number of threads."""
    ids, other = tokens(600), tokens(90, seed=7)
    model = models("llama3", max_position_embeddings=700)
    alone = runner(model, blocks=50, threads=3, **settings)
    expected = torch.cat(
        [run(alone, (0, ids, 0, 599, range(40), 1)), run(alone, (0, ids, 599, 600, range(40), 1))]
    )
    busy = runner(model, blocks=50, threads=2, **settings)
    run(busy, (0, ids, 0, 300, range(40), 0))
    first = run(busy, (1, other, 0, 90, range(40, 46), 1), (0, ids, 300, 599, range(40), 1))[1]
    many = [(n, other, 50, 51, [*range(40, 43), 43 + n], 0) for n in range(1, 6)]
    second = run(busy, *many, (0, ids, 599, 600, range(40), 1))[0]
    assert torch.equal(torch.stack([first, second]), expected)


def test_a_step_that_wants_nothing(models):
    model = models("llama2")
    assert run(runner(model), (0, tokens(), 0, 5, [0], 0)).shape == (0, tiny_models.VOCABULARY)


def test_blocks_are_copied_first(models):
    model, ids = models("qwen3"), tokens()
    model_runner = runner(model)
    run(model_runner, (0, ids, 0, 20, [0, 1], 0))
    other = ids[:20] + tokens(seed=9)[20:]
    rows = run(model_runner, (0, ids, 20, 24, [0, 1], 1), (1, other, 20, 24, [0, 2], 1), copies=((1, 2),))
    torch.testing.assert_close(rows[0], logits_of(model, ids)[23], **CLOSE)
    torch.testing.assert_close(rows[1], logits_of(model, other)[23], **CLOSE)


def test_a_hole_behind_the_window(models):
    model, ids = models("mistral"), tokens()
    model_runner = runner(model)
    run(model_runner, (0, ids, 0, 30, [4, 5], 0))
    rows = run(model_runner, (0, ids, 30, 31, [-1, 5], 1))
    torch.testing.assert_close(rows[0], logits_of(model, ids)[30], **CLOSE)


def test_a_tree(models):
    """Two continuations of a prefix in one pass."""
    model, ids = models("llama3"), tokens()
    left, right = tokens(seed=4)[:2], tokens(seed=5)[:2]
    model_runner = runner(model)
    run(model_runner, (0, ids, 0, 18, [0, 1], 0))
    row = [*ids[:19], *left, *right]
    parents = ((-1, 0, 1, 0, 3),)
    rows = run(model_runner, (0, row, 18, 23, [0, 1], 5), parents=parents)
    for ends, path in ((2, left), (4, right)):
        expected = logits_of(model, ids[:19] + path)
        torch.testing.assert_close(rows[ends], expected[-1], **CLOSE)


@pytest.mark.parametrize(
    ("kv_dtype", "near"),
    [("float32", 2e-4), ("float16", 5e-3), ("bfloat16", 0.05), ("int8", 0.1), ("int4", 1.0)],
)
def test_the_accepted_path_of_a_tree_moves_together(models, kv_dtype, near):
    """What a chain leaves in the same slots; of int4 but for the rounding of weights."""
    model, ids = models("llama3"), tokens()
    left, right, after = tokens(seed=4)[:2], tokens(seed=5)[:2], [7]
    model_runner = runner(model, kv_dtype=kv_dtype)
    run(model_runner, (0, ids, 0, 18, [0, 1], 0))
    row = [*ids[:19], *left, *right]
    run(model_runner, (0, row, 18, 23, [0, 1], 5), parents=((-1, 0, 1, 0, 3),))
    model_runner.move([(21, 19), (22, 20)])
    chain = ids[:19] + right + after
    rows = run(model_runner, (0, chain, 21, 22, [0, 1], 1))
    torch.testing.assert_close(rows[0], logits_of(model, chain)[-1], rtol=0, atol=near)
    again = runner(model, kv_dtype=kv_dtype)
    for start, stop in ((0, 18), (18, 21)):
        run(again, (0, chain, start, stop, [0, 1], 0))
    bound = 5e-3 if kv_dtype == "int4" else 1e-5  # int8 weights are rounded by where their token lies
    assert torch.allclose(rows, run(again, (0, chain, 21, 22, [0, 1], 1)), atol=bound)


FORCED = {
    "bf16": ({}, 0.0),
    "bf16, 16 bits": ({"weights": "bf16", "bits": 16}, 2e-5),
    "int4, 8 bits": ({"weights": "int4", "bits": 8}, 5e-3),
    "int4, 16 bits": ({"weights": "int4", "bits": 16}, 2e-3),
    "int8, 16 bits, int8 keys": ({"weights": "int8", "bits": 16, "kv_dtype": "int8"}, 5e-3),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("case", sorted(FORCED))
@pytest.mark.parametrize("width", [1, 3])
def test_forced_drafts_are_plain_decoding(case, width, models):
    """Of right drafts in a chain the log-probabilities are bit for bit those of one token a step. In a tree
    the ancestors lie in other slots, so attention sums them in another order, and an activation may round to
    its other neighbour."""
    (settings, bound), depth, start, stop = FORCED[case], 4, 60, 95
    ids, blocks = tokens(120), range(10)
    plain, drafted = (runner(models("llama3"), **settings) for _ in range(2))
    for each in (plain, drafted):
        run(each, (0, ids, 0, start, blocks, 0))
    worst = 0.0
    for at in range(start, stop, depth + 1):
        steps = range(at, at + depth + 1)
        expected = torch.cat([run(plain, (0, ids, token, token + 1, blocks, 1)) for token in steps])
        row, parents, path = [ids[at]], [-1], [0]
        for token in steps[1:]:  # the right one behind its wrong siblings
            parents += [path[-1]] * width
            row += [*((ids[token] + other) % 300 for other in range(1, width)), ids[token]]
            path.append(len(row) - 1)
        text = ids[:at] + row
        rows = run(drafted, (0, text, at, len(text), blocks, len(row)), parents=(tuple(parents),))
        drafted.move([(at + token, at + index) for index, token in enumerate(path) if token != index])
        worst = max(worst, float((rows[path].log_softmax(-1) - expected.log_softmax(-1)).abs().max()))
    assert worst == 0 if width == 1 else worst <= (bound or 2e-5), worst


def test_a_tree_under_a_window(models):
    """Siblings share a position: the window counts positions, not places."""
    model, ids = models("mistral", sliding_window=3), tokens()
    model_runner = runner(model)
    run(model_runner, (0, ids, 0, 18, [0, 1], 0))
    row = [*ids[:19], 40, 50, 60, 70]
    rows = run(model_runner, (0, row, 18, 23, [0, 1], 5), parents=((-1, 0, 0, 2, 3),))
    expected = logits_of(model, [*ids[:19], 50, 60, 70])
    torch.testing.assert_close(rows[[2, 3, 4]], expected[-3:], **CLOSE)


@pytest.mark.parametrize("made", ["compiled"], indirect=True)
def test_ancestors():
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert ancestors([-1, 0, 0, 2]).astype(int).tolist() == expected
    assert np.array_equal(ancestors([-1, -1]), np.eye(2, dtype=bool))


@pytest.mark.few(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(family, models):
    model, ids = models(family), tokens(12)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    actual, blocks = runner(model), [3, 0, 2]
    row, start = list(ids), 0
    while len(row) < 36:
        rows = run(actual, (0, row, start, len(row), blocks, 1))
        start = len(row)
        row.append(int(rows[0].argmax()))
    assert row == expected[0].tolist()


@pytest.mark.parametrize("changes", [{"head_dim": 48}, {"head_dim": 128}, {"num_key_value_heads": 1}])
def test_shapes_of_heads(changes, models):
    model, ids = models("qwen3", **changes), tokens()
    result = run(runner(model, block_size=32), (0, ids, 0, LENGTH, [5, 2], LENGTH))
    torch.testing.assert_close(result, logits_of(model, ids), **CLOSE)


def test_long_sequences_are_cut_into_parts(models):
    model = models("llama3", max_position_embeddings=700)
    ids = tokens(700)
    actual, blocks = runner(model, blocks=50), list(range(49, 5, -1))
    run(actual, (0, ids, 0, 690, blocks, 0))
    rows = torch.cat([run(actual, (0, ids, at, at + 1, blocks, 1)) for at in range(690, 700)])
    torch.testing.assert_close(rows, logits_of(model, ids)[690:], **CLOSE)


@pytest.mark.parametrize("bits", [8, 16])
def test_bfloat16_keys_and_values(bits, models):
    model, ids = models("llama3"), tokens()
    result = run(runner(model, kv_dtype="bfloat16", bits=bits), (0, ids, 0, LENGTH, [5, 2, 9], LENGTH))
    expected = logits_of(model, ids)
    assert divergence(expected, result) < 1e-3


@pytest.mark.parametrize("weights, bound", [("int8", 2e-3), ("int4", 0.3)])
def test_low_bits_are_near(weights, bound, models):
    model, ids = models("llama3"), tokens()
    result = run(runner(model, weights=weights), (0, ids, 0, LENGTH, [5, 2, 9], LENGTH))
    assert divergence(logits_of(model, ids), result) < bound


def divergence(expected, found):
    """Mean over tokens, in nats."""
    p, q = torch.log_softmax(expected.double(), 1), torch.log_softmax(found.double(), 1)
    return float((p.exp() * (p - q)).sum(1).mean())


def test_what_is_refused(made, models):
    with pytest.raises(ModelError, match="gpt2"):
        runner(models("gpt2"))
    wrong = "fp8" if made == "compiled" else "kivi4"
    with pytest.raises(UsageError, match=wrong):
        runner(models("llama3"), kv_dtype=wrong)
    model = models("llama3")
    tensors = model.state_dict() | {"model.layers.0.self_attn.sinks": torch.zeros(8)}
    with pytest.raises(ModelError, match=r"no place for .*self_attn\.sinks"):
        (compiled if made == "compiled" else device)(model.config, tensors, blocks=4)
    if made == "compiled":
        with pytest.raises(UsageError, match="blocks of 8"):
            runner(models("llama3"), block_size=8)


@pytest.mark.parametrize("changes", [{}, {"head_dim": 48}, {"num_key_value_heads": 1}])
def test_int8_keys_and_values(changes, models):
    """A scale for each token and head; chunk by chunk the same."""
    model, ids = models("qwen3", **changes), tokens()
    expected, blocks = logits_of(model, ids), [5, 2, 9]
    result = run(runner(model, kv_dtype="int8"), (0, ids, 0, LENGTH, blocks, LENGTH))
    assert 0 < divergence(expected, result) < 1e-3
    again = runner(model, kv_dtype="int8", threads=1)
    cuts = [0, 3, 19, 20, 33, LENGTH]
    rows = [run(again, (0, ids, a, b, blocks, b - a)) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(rows), result)


@pytest.mark.parametrize("made", ["compiled"], indirect=True)
def test_layers_of_different_kinds(models):
    """int8 mixed with bf16 is as near as its parts; a layer of another shape is refused."""
    model, ids = models("llama3"), tokens()
    tensors = model.state_dict()
    result = {
        kind: model_weights(model.config, tensors, tensors.__getitem__, weights=kind, group=16)
        for kind in ("bf16", "int8")
    }
    layers = (result["int8"].layers[0], *result["bf16"].layers[1:])
    mixed = dataclasses.replace(result["bf16"], layers=layers)
    outcome = run(Compiled(mixed, blocks=3, **EXACT), (0, ids, 0, LENGTH, [0, 2, 1], LENGTH))
    assert 0 < divergence(logits_of(model, ids), outcome) < 2e-3
    wrong = dataclasses.replace(layers[0], out=layers[0].down)
    with pytest.raises(ModelError, match="a layer's out is"):
        Compiled(dataclasses.replace(mixed, layers=(wrong, *layers[1:])), blocks=3)


def fill(actual, octet):
    """Every byte of a pool."""
    pool = actual._program.pool
    for plane in [pool] if isinstance(pool, torch.Tensor) else pool.store.planes:
        plane.view(torch.uint8).fill_(octet)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8", "float32"])
def test_what_lies_in_free_places_is_not_seen(kv_dtype, models):
    model, ids = models("llama3"), tokens()
    rows = []
    for actual in (runner(model, kv_dtype=kv_dtype), runner(model, kv_dtype=kv_dtype)):
        fill(actual, 255 if rows else 0)  # NaN, in floats
        parts = [run(actual, (0, ids, a, b, [5, 2], b - a)) for a, b in ((0, 7), (7, 8), (8, 21))]
        rows.append(torch.cat(parts))
    assert torch.equal(*rows)


@pytest.mark.parametrize("made", ["compiled"], indirect=True)
def test_a_step_without_memory_is_an_error_and_the_next_one_runs(models):
    """2^50 columns: what lies between layers cannot be held."""
    model = models("llama3")
    actual, ids = runner(model), tokens()
    part = (0, ids, 0, LENGTH, [0, 1, 2], 1)
    wanted, structure = run(actual, part), actual._program._model
    hidden, structure.hidden = structure.hidden, 1 << 50
    for _ in range(3):
        with pytest.raises(MemoryError, match="a step: there is not enough memory"):
            run(actual, part)
    structure.hidden = hidden
    assert torch.equal(run(actual, part), wanted)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("gemma3", "attn_logit_softcapping"),
        ("llama3", "final_logit_softcapping"),
        ("llama3", "query_pre_attn_scalar"),
    ],
)
def test_keys_of_other_families_are_not_applied(family, key, models):
    """Gemma 3's config has the cap of Gemma 2's scores, and Llama's may have any: their modules read none."""
    model, ids = models(family, **{key: 0.5}), tokens()
    result = run(runner(model), (0, ids, 0, LENGTH, [5, 2, 9], LENGTH))
    torch.testing.assert_close(result, logits_of(model, ids), **CLOSE)
