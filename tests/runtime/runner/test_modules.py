"""The transformers runner: greedy tokens equal those of plain transformers, whatever the step looks like."""

import copy
import functools
from functools import partial

import pytest
import torch

from attar.errors import ModelError, SettingsError
from attar.runtime.runner.modules import Modules
from attar.runtime.step import StepInput, TokenSpan
from tests import tiny_models
from tests.runtime.driving import Driver, greedy

PROMPTS = [21, 5, 13, 1]  # lengths; the window of the families that have one is 8
COUNT = 7


@functools.cache
def case(family):
    """The plain model, a runner, the prompts and what transformers answers."""
    plain = tiny_models.build(family)
    prompts = [tiny_models.tokens(plain, batch=1, length=n, seed=n)[0].tolist() for n in PROMPTS]
    wanted = [greedy(plain, prompt, COUNT) for prompt in prompts]
    return plain, Modules(copy.deepcopy(plain), blocks=64, block_size=4), prompts, wanted


@pytest.mark.few(2)
@pytest.mark.parametrize("family", tiny_models.DECODERS)
def test_alone(family):
    _, runner, prompts, wanted = case(family)
    for prompt, want in zip(prompts, wanted, strict=True):
        driver = Driver(runner)
        assert driver.extend(driver.add(prompt), count=COUNT) == [want]


@pytest.mark.few(2)
@pytest.mark.parametrize("family", tiny_models.DECODERS)
def test_mixed_with_chunks_and_latecomers(family):
    """Prompts in chunks of 3 in a batch with decoding sequences, and one that joins later."""
    _, runner, prompts, wanted = case(family)
    driver = Driver(runner, seed=1)
    *first, last = [driver.add(prompt) for prompt in prompts]
    driver.extend(*first, count=2, cut=3)
    ahead = [len(one.tokens) for one in first]
    driver.extend(*first, last, count=COUNT, cut=3)
    assert ahead == [n + 2 for n in PROMPTS[:3]]
    for one, prompt, want in zip([*first, last], prompts, wanted, strict=True):
        assert one.tokens[len(prompt) :][:COUNT] == want


@pytest.mark.few(3)
@pytest.mark.parametrize("family", tiny_models.DECODERS)
def test_shared_blocks_and_forks(family):
    """A prefix of 16 tokens is read from another sequence's blocks; a fork copies the partial tail."""
    plain, runner, prompts, wanted = case(family)
    driver = Driver(runner, seed=2)
    owner = driver.add(prompts[0])
    driver.extend(owner, count=1)
    other = prompts[0][:16] + prompts[2][:3]
    guest = driver.add(other, shared=owner, upto=16)
    child, copies = driver.fork(owner)
    child.tokens[-1] = (child.tokens[-1] + 1) % tiny_models.VOCABULARY  # another branch
    branch = child.tokens[:]
    assert copies
    actual = driver.extend(owner, guest, child, count=4, copies=copies)
    assert actual[0] == wanted[0][1:5]
    assert actual[1] == greedy(plain, other, 4)
    assert actual[2] == greedy(plain, branch, 4)


@pytest.mark.few(3)
@pytest.mark.parametrize("family", tiny_models.DECODERS)
def test_a_tree_sees_its_ancestors_only(family):
    """Every branch of a tree gives the logits of the chain that leads to it."""
    plain, runner, prompts, _ = case(family)
    prompt, drafts, parents = prompts[2], [40, 50, 60, 70, 80], (-1, 0, 0, 1, 2)
    driver = Driver(runner, seed=3)
    one = driver.add(prompt)
    driver.run((one, None))
    blocks = (*one.blocks, driver.free.pop(), driver.free.pop())
    step = StepInput(drafts, (TokenSpan(0, 13, 18, blocks, 5),), parents=(parents,))
    step.check(4, 64)
    logits = runner.run(step)
    for chain in ([0, 1, 3], [0, 2, 4]):
        rows = torch.tensor([prompt + [drafts[index] for index in chain]])
        want = tiny_models.logits(plain, rows)[0, -3:]
        torch.testing.assert_close(logits[chain], want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "fp8", "int4", "kivi4"])
def test_the_accepted_path_of_a_tree_moves_together(kv_dtype):
    """What follows is what follows the chain."""
    plain = tiny_models.build("llama3")
    prompt, drafts, parents = (
        tiny_models.tokens(plain, batch=1, length=35)[0].tolist(),
        [40, 50, 60, 70],
        (-1, -1, 1, 2),
    )
    size, rows = 32, []
    for tree in (True, False):
        runner = Modules(copy.deepcopy(plain), blocks=4, block_size=size, kv_dtype=kv_dtype)
        run = partial(_run, runner, (2, 0))
        run(prompt, 0, 35)
        if tree:
            run(drafts, 35, 39, parents)
            runner.move([(at, at - 1) for at in (36 - size, 37 - size, 38 - size)])
        else:
            run(drafts[1:], 35, 38)
        rows.append(run([80], 38, 39))
    torch.testing.assert_close(rows[0], rows[1], atol=2e-5, rtol=1e-4)


def _run(runner, blocks, tokens, start, stop, parents=None):
    trees = None if parents is None else (parents,)
    return runner.run(StepInput(tokens, (TokenSpan(0, start, stop, blocks, 1),), parents=trees))


def test_a_tree_under_a_window():
    """Siblings share a position: the window counts positions, not places."""
    plain = tiny_models.build("mistral", sliding_window=2)
    runner = Modules(copy.deepcopy(plain), blocks=8, block_size=4)
    prompt, drafts, parents = case("mistral")[2][1], [40, 50, 60, 70], (-1, -1, 1, 2)
    driver = Driver(runner)
    one = driver.add(prompt)
    driver.run((one, None))
    span = driver.span(one, 9, 4)
    logits = runner.run(StepInput(drafts, (span,), parents=(parents,)))
    want = tiny_models.logits(plain, torch.tensor([prompt + drafts[1:]]))[0, -3:]
    torch.testing.assert_close(logits[1:], want, atol=2e-5, rtol=1e-4)


def test_blocks_behind_the_window_are_not_touched():
    _, runner, prompts, wanted = case("mistral")
    driver = Driver(runner)
    one = driver.add(prompts[0])
    driver.extend(one, count=1)
    one.blocks[:3] = [-1] * 3  # places [0, 12); token 21 sees [14, 22)
    assert driver.extend(one, count=COUNT - 1) == [wanted[0][1:]]


def test_wants():
    """The wanted rows, in the order of the spans; none at all gives no rows."""
    plain, runner, prompts, _ = case("llama3")
    spans = (
        TokenSpan(0, 0, 21, tuple(range(6)), 3),
        TokenSpan(1, 0, 5, (10, 11), 0),
        TokenSpan(2, 0, 13, (20, 21, 22, 23), 13),
    )
    logits = runner.run(StepInput(prompts[0] + prompts[1] + prompts[2], spans))
    want = [tiny_models.logits(plain, torch.tensor([prompt]))[0] for prompt in prompts]
    assert logits.shape == (16, runner.vocabulary) and logits.dtype == torch.float32
    torch.testing.assert_close(logits, torch.cat([want[0][-3:], want[2]]), atol=2e-5, rtol=1e-4)
    assert runner.run(StepInput(prompts[1], (TokenSpan(0, 0, 5, (0, 1), 0),))).shape == (0, runner.vocabulary)


def test_a_row_does_not_see_the_batch():
    """Attention is done span by span: other sequences of the batch change its logits by rounding only."""
    _, runner, prompts, _ = case("gemma2")
    driver = Driver(runner)
    alone = driver.run((driver.add(prompts[0]), None))[0]
    neighbour = driver.run((driver.add(prompts[1]), None), (driver.add(prompts[0]), None))[1]
    torch.testing.assert_close(alone, neighbour, atol=1e-5, rtol=1e-5)


def test_bfloat16():
    plain = tiny_models.build("llama3").bfloat16()
    runner = Modules(copy.deepcopy(plain), blocks=8, block_size=4)
    rows = tiny_models.tokens(plain, batch=1, length=9)
    logits = runner.run(StepInput(rows[0].tolist(), (TokenSpan(0, 0, 9, (0, 1, 2), 9),)))
    assert runner.pool.kv_dtype == "bfloat16" and logits.dtype == torch.float32
    torch.testing.assert_close(logits, tiny_models.logits(plain, rows)[0].float(), atol=0.1, rtol=0.05)


@pytest.mark.parametrize(
    ("config", "model", "changes", "words"),
    [
        ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_head": 2, "n_layer": 2}, "Bloom"),
        ("RwkvConfig", "RwkvForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2}, "Rwkv"),
    ],
)
def test_models_that_cannot_run_are_refused_by_name(config, model, changes, words):
    import transformers

    result = getattr(transformers, config)(vocab_size=32, **changes)
    with pytest.raises(ModelError, match=words):
        Modules(getattr(transformers, model)(result).eval(), blocks=2)


def test_the_context_of_ropes_that_change_with_length_is_that_of_their_training():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = tiny_models.build(
        "phi3",
        rope_parameters={**rope, "original_max_position_embeddings": 32},
        original_max_position_embeddings=32,
    )
    assert Modules(model, blocks=2).context == 32


def test_an_unknown_kv_dtype_is_refused():
    with pytest.raises(SettingsError, match=r"kv_dtype.*did you mean int8"):
        Modules(tiny_models.build("llama3"), blocks=2, kv_dtype="int-8")


@pytest.mark.parametrize("token", [-1, 2**31 - 1])
def test_a_token_id_outside_the_vocabulary_is_an_error_before_anything_is_written(token):
    _, runner, prompts, _ = case("llama3")
    ids = [*prompts[2], token]
    with pytest.raises(IndexError, match="token ids outside"):
        runner.run(StepInput(ids, (TokenSpan(900, 0, len(ids), tuple(range(4)), 1),)))
    ids[-1] = runner.vocabulary
    with pytest.raises(IndexError, match="token ids outside"):
        runner.run(StepInput(ids, (TokenSpan(900, 0, len(ids), tuple(range(4)), 1),)))
