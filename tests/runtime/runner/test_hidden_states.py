"""Hidden states that runners keep by slot: those of transformers, however the tokens come."""

import numpy as np
import pytest
import torch

from attar.errors import ModelError
from attar.runtime.runner.compiled import compiled
from attar.runtime.runner.device.runner import device_runner
from attar.runtime.runner.modules import Modules
from attar.runtime.step import StepInput, TokenSpan
from tests import tiny_models
from tests.compiler import no_compiler

FAMILIES = ("llama3", "qwen3", "gemma2", "gpt2", "gpt_neox", "opt")
COMPILED = ("llama3", "qwen3", "gemma2")
CLOSE = {"rtol": 2**-7, "atol": 2e-3}  # kept in bfloat16
LENGTH = 40


def model_of(family):
    model = tiny_models.build(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


def states_of(model, ids):
    """After every block, then after the final norm: (layers + 1, tokens, hidden)."""
    with torch.no_grad():
        outputs = model(torch.tensor([ids]), output_hidden_states=True)
    states = torch.cat(outputs.hidden_states[1:])
    blocks = []  # transformers reports the last one behind the norm
    last = next(module for name, module in model.named_modules() if name.endswith(f".{len(states) - 1}"))
    handle = last.register_forward_hook(lambda _, __, output: blocks.append(output))
    with torch.no_grad():
        model(torch.tensor([ids]))
    handle.remove()
    block = blocks[0][0] if isinstance(blocks[0], tuple) else blocks[0]
    return torch.cat([states[:-1], block.reshape(1, len(ids), -1), states[-1:]])


def runners(family, model):
    yield Modules(model, blocks=24)
    if family in COMPILED and not no_compiler():
        settings = {"kv_dtype": "float32", "bits": 16, "blocks": 24, "threads": 2}
        yield compiled(model.config, model.state_dict(), **settings)
    if family in COMPILED:
        yield device_runner(model.config, model.state_dict(), kv_dtype="float32", blocks=24)


def tokens(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, tiny_models.VOCABULARY, (LENGTH,), generator=generator).tolist()


def step(*parts, copies=(), parents=None):
    """A step of (sequence, ids, start, stop, blocks)."""
    spans = tuple(TokenSpan(sequence, a, b, tuple(blocks), 1) for sequence, _, a, b, blocks in parts)
    return StepInput([token for _, ids, a, b, _ in parts for token in ids[a:b]], spans, copies, parents)


def slots(blocks, start, stop):
    return np.array([blocks[i // 16] * 16 + i % 16 for i in range(start, stop)])


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_of_transformers(family):
    model, ids, other = model_of(family), tokens(), tokens(1)
    wanted, others = states_of(model, ids), states_of(model, other)
    layers = (0, len(wanted) - 2, len(wanted) - 1)
    for runner in runners(family, model):
        pool = runner.keep_hidden(layers)
        assert pool.layers == layers
        runner.run(step((0, ids, 0, 17, [5, 2, 9])))
        runner.run(
            step((0, ids, 17, 39, [5, 2, 9]), (1, other, 0, LENGTH, [1, 8, 3]))
        )  # a chunk, and a batch
        runner.run(step((0, ids, 39, LENGTH, [5, 2, 9])))
        for blocks, states in (([5, 2, 9], wanted), ([1, 8, 3], others)):
            kept = pool.read(slots(blocks, 0, LENGTH))
            torch.testing.assert_close(kept, states[list(layers)].transpose(0, 1), **CLOSE)


def test_they_go_with_copied_blocks_and_moved_slots():
    model, ids = model_of("llama3"), tokens()
    wanted = states_of(model, ids)[[1]].transpose(0, 1)
    for runner in runners("llama3", model):
        pool = runner.keep_hidden([1])
        runner.run(step((0, ids, 0, 24, [5, 2])))
        runner.run(step((1, ids, 24, 25, [5, 7]), copies=((2, 7),)))  # a fork writes to its copy
        torch.testing.assert_close(pool.read(slots([5, 7], 0, 25)), wanted[:25], **CLOSE)
        tree = [*ids[:25], 3, ids[25], ids[26]]  # after 24 a wrong draft and a chain of right ones
        parents = ((-1, 0, 0, 2),)
        runner.run(step((1, tree, 24, 28, [5, 7]), parents=parents))
        runner.move([(7 * 16 + 10, 7 * 16 + 9), (7 * 16 + 11, 7 * 16 + 10)])
        torch.testing.assert_close(pool.read(slots([5, 7], 0, 27)), wanted[:27], **CLOSE)


def test_without_a_final_norm_its_states_are_refused():
    model = model_of("llama3")
    model.model.norm = torch.nn.Identity()
    with pytest.raises(ModelError, match="a final norm"):
        Modules(model, blocks=4).keep_hidden([model.config.num_hidden_layers])


def test_what_is_not_asked_for_is_not_kept():
    model, ids = model_of("llama3"), tokens()
    for runner in runners("llama3", model):
        before = runner.run(step((0, ids, 0, LENGTH, [5, 2, 9])))
        runner.keep_hidden([0])
        torch.testing.assert_close(runner.run(step((0, ids, 0, LENGTH, [5, 2, 9]))), before, rtol=0, atol=0)
