"""Layers that carry states, through the modules runner and the compiled step: logits and greedy tokens are
transformers' own, alone and in mixed batches, whatever the step looks like."""

import copy
import dataclasses
import functools
import itertools
import random

import pytest
import torch

from attar.errors import ModelError
from attar.runtime.runner.compiled import compiled
from attar.runtime.runner.lora import LoraAdapter, LoraUpdate
from attar.runtime.runner.modules import Modules
from attar.runtime.step import StepInput, TokenSpan
from tests import tiny_models
from tests.compiler import no_compiler
from tests.runtime.driving import Driver, greedy

FEW = ("qwen3_next", "lfm2", "falcon_h1", "jamba", "mamba2")  # delta rule, convolution, both, Mamba 1, alone
OTHERS = ("granitemoehybrid", "lfm2_moe", *(family for family in tiny_models.STATEFUL if family not in FEW))
COMPILED = ("lfm2 compiled", "qwen3_5 compiled", "granitemoehybrid compiled", "falcon_h1 compiled")
COMPILED += ("mamba2 compiled",)
COMPILED += (
    "nemotron_h compiled",
    "nemotron_h_moe compiled",
    "bamba compiled",
    "lfm2_moe compiled",
    "qwen3_next compiled",
)
if not no_compiler():
    FEW = (*FEW, *COMPILED[:4])
    OTHERS = (*OTHERS, *COMPILED[4:])
FAMILIES = (*FEW, *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS))
SMALL = {"mamba2": {"chunk_size": 8}, "falcon_h1": {"mamba_chunk_size": 8}}  # several chunks of a prompt
PROMPTS = [21, 5, 13, 1]
COUNT = 5
CLOSE = {"atol": 1e-3, "rtol": 1e-3}  # of logits up to 5, chunked sums against recurrent ones


@functools.cache
def case(name):
    """The plain model, a runner, the prompts and what transformers answers."""
    family, _, kind = name.partition(" ")
    plain = tiny_models.build(family, **SMALL.get(family, {}))
    if kind:
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.copy_(parameter.bfloat16().float())
    prompts = [tiny_models.tokens(plain, batch=1, length=n, seed=n)[0].tolist() for n in PROMPTS]
    wanted = [greedy(plain, prompt, COUNT) for prompt in prompts]
    if kind:
        runner = compiled(plain.config, plain.state_dict(), blocks=64, threads=2, kv_dtype="float32", bits=16)
    else:
        runner = Modules(copy.deepcopy(plain), blocks=64, block_size=4)
    return plain, runner, prompts, wanted


def span(start, stop, wants=None, *, sequence=0, drafts=0):
    blocks = tuple(range(16 * sequence, 16 * sequence + 16))
    return TokenSpan(sequence, start, stop, blocks, stop - start if wants is None else wants, drafts=drafts)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_chunks_and_alone(family):
    """Of every token of a prompt: in one chunk, in chunks of 6, and of 6 then token by token."""
    plain, runner, prompts, _ = case(family)
    prompt = prompts[0]
    want = tiny_models.logits(plain, torch.tensor([prompt]))[0]
    for cuts in ([0, 21], [0, 6, 12, 18, 21], [0, 6, *range(7, 22)]):
        runner.forget(0)
        rows = [
            runner.run(StepInput(prompt[start:stop], (span(start, stop),)))
            for start, stop in itertools.pairwise(cuts)
        ]
        torch.testing.assert_close(torch.cat(rows), want, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_with_chunks_and_latecomers(family):
    """Prompts in chunks of 3 in a batch with decoding sequences, and one that joins later."""
    _, runner, prompts, wanted = case(family)
    driver = Driver(runner, seed=1)
    *first, last = [driver.add(prompt) for prompt in prompts]
    driver.extend(*first, count=2, cut=3)
    driver.extend(*first, last, count=COUNT, cut=3)
    for sequence, prompt, want in zip([*first, last], prompts, wanted, strict=True):
        assert sequence.tokens[len(prompt) :][:COUNT] == want


@pytest.mark.parametrize("family", FEW)
def test_a_fork_continues_from_the_same_states(family):
    plain, runner, prompts, wanted = case(family)
    driver = Driver(runner, seed=2)
    parent = driver.add(prompts[0])
    driver.extend(parent, count=1)
    child, copies = driver.fork(parent)
    runner.fork(parent.number, child.number)
    child.tokens[-1] = (child.tokens[-1] + 1) % tiny_models.VOCABULARY  # another branch
    branch = child.tokens[:]
    actual = driver.extend(parent, child, count=3, copies=copies)
    assert actual == [wanted[0][1:4], greedy(plain, branch, 3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_drafts_leave_no_trace(family):
    """Random drafts, of which random numbers are right: the logits are those of the tokens that stay."""
    plain, runner, prompts, _ = case(family)
    draw, text = random.Random(0), prompts[0] + prompts[2]
    want = tiny_models.logits(plain, torch.tensor([text]))[0]
    runner.run(StepInput(text[:9], (span(0, 9, 1),)))
    done = 9
    while done < len(text):
        right = min(draw.randrange(4), len(text) - done - 1)
        wrong = [(text[done] + 1) % tiny_models.VOCABULARY] * draw.randrange(3)
        tokens = text[done : done + 1 + right] + wrong
        drafts = len(tokens) - 1
        neighbour = span(0, 3, 1, sequence=1)
        step = StepInput([*tokens, 7, 8, 9], (span(done, done + len(tokens), drafts=drafts), neighbour))
        rows = runner.run(step)
        torch.testing.assert_close(rows[: 1 + right], want[done : done + 1 + right], **CLOSE)
        done += 1 + right


@pytest.mark.parametrize("family", ["qwen3_next", *COMPILED[:1]])
def test_drafts_that_were_run_may_be_rejected_later(family):
    """As a draft model runs them: one token a pass, none of them certain."""
    plain, runner, prompts, _ = case(family)
    runner.forget(0)
    prompt, drafts = prompts[0], [7, 8, 9]
    runner.run(StepInput(prompt, (span(0, 21, 1),)))
    for index, token in enumerate(drafts, 1):
        runner.run(StepInput([token], (span(20 + index, 21 + index, 1, drafts=index),)))
    rows = runner.run(StepInput([30, 31], (span(22, 24),)))  # behind the first draft alone
    want = tiny_models.logits(plain, torch.tensor([[*prompt, 7, 30, 31]]))[0, -2:]
    torch.testing.assert_close(rows, want, **CLOSE)


def test_a_step_that_fails_changes_no_state():
    plain, runner, prompts, _ = case("lfm2")
    prompt = prompts[0]
    runner.run(StepInput(prompt[:9], (span(0, 9, 1),)))
    before = runner.states.before(span(9, 12))

    def fail(*_):
        raise RuntimeError("a layer fails")

    hook = runner.model.model.layers[2].feed_forward.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a layer fails"):
        runner.run(StepInput(prompt[9:12], (span(9, 12),)))
    hook.remove()
    assert runner.repeats and runner.states.before(span(9, 12)) is before
    rows = runner.run(StepInput(prompt[9:12], (span(9, 12),)))
    want = tiny_models.logits(plain, torch.tensor([prompt]))[0, 9:12]
    torch.testing.assert_close(rows, want, **CLOSE)


@pytest.mark.parametrize("family", ["lfm2", *COMPILED[:1]])
def test_tokens_without_the_states_before_them_are_an_error(family):
    _, runner, prompts, _ = case(family)
    runner.forget(0)
    with pytest.raises(AssertionError, match="sequence 0 starts at 9 without states"):
        runner.run(StepInput(prompts[0][9:12], (span(9, 12),)))
    runner.run(StepInput(prompts[0][:9], (span(0, 9, 1),)))
    with pytest.raises(AssertionError, match="starts at 8, its states are of 9 to 9 tokens"):
        runner.run(StepInput(prompts[0][8:12], (span(8, 12),)))
    with pytest.raises(AssertionError, match="one chain of tokens"):
        runner.run(StepInput([7, 8], (span(9, 11),), parents=((-1, -1),)))


def test_sequences_that_decode_take_one_call_of_a_layer():
    _, runner, prompts, _ = case("mamba2")
    driver = Driver(runner)
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.extend(*sequences, count=1)
    shapes = []
    layer = runner.model.backbone.layers[0].mixer.in_proj
    hook = layer.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape)))
    driver.extend(*sequences, count=2)
    hook.remove()
    assert shapes == [(4, 1, 64)] * 2


def test_an_adapter_changes_the_layers_of_its_own_sequence():
    """Logits are those of the merged weight, beside a sequence without the adapter, with drafts run again."""
    plain, runner, prompts, _ = case("lfm2")
    path, prompt = "model.layers.0.conv.in_proj", prompts[2]
    A, B = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    update = LoraUpdate(A, B.T.repeat(3, 1))
    merged = copy.deepcopy(plain)
    merged.get_submodule(path).weight.data += update.B @ update.A
    runner.lora.add("key", LoraAdapter("name", {path: update}, "digest"))
    spans = (span(0, 9), span(0, 9, sequence=1))
    first = runner.run(StepInput(prompt[:9] * 2, (spans[0], dataclasses.replace(spans[1], adapter="key"))))
    spans = (span(9, 12, drafts=2), dataclasses.replace(span(9, 12, sequence=1, drafts=2), adapter="key"))
    runner.run(StepInput([*prompt[9:11], 5] * 2, spans))
    spans = (span(11, 13), dataclasses.replace(span(11, 13, sequence=1), adapter="key"))
    last = runner.run(StepInput(prompt[11:] * 2, spans))
    runner.lora.remove("key")
    for index, model in enumerate((plain, merged)):
        want = tiny_models.logits(model, torch.tensor([prompt]))[0]
        torch.testing.assert_close(first[9 * index : 9 * index + 9], want[:9], **CLOSE)
        torch.testing.assert_close(last[2 * index : 2 * index + 2], want[11:], **CLOSE)


def test_bytes_of_a_sequence():
    """LFM2: two convolutions of 64 channels and 3 inputs. Mamba 2: three layers of 8 x 16 x 16 numbers and a
    convolution of 160 channels and 4 inputs."""
    assert case("lfm2")[1].state_bytes == 2 * 64 * 3 * 4
    assert (
        case("lfm2 compiled")[1].state_bytes == 2 * 64 * 2 * 4
    )  # without the newest, which is a token's own
    assert case("mamba2")[1].state_bytes == 3 * (8 * 16 * 16 + 160 * 4) * 4
    assert Modules(tiny_models.build("llama3"), blocks=2).state_bytes == 0


def test_mamba_1_is_run_token_by_token_behind_a_state():
    """transformers' code for several tokens begins from no state there; elsewhere it does not."""
    assert case("jamba")[1]._stepwise and case("mamba")[1]._stepwise
    assert not case("mamba2")[1]._stepwise and not case("qwen3_next")[1]._stepwise


def test_a_state_that_no_cache_holds_is_refused():
    model = tiny_models.build("qwen3_next")
    layer = type(model.model.layers[0].linear_attn)
    other = type("Other", (layer,), {"forward": lambda self, hidden_states, **_: hidden_states})
    model.model.layers[1].linear_attn.__class__ = other
    words = r"layers\.1\.linear_attn keeps a state from token to token, which no runner stores"
    with pytest.raises(ModelError, match=words):
        Modules(model, blocks=2)
