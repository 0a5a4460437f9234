"""Steps of the compiled runner on tiny models, and the logits that transformers has for them."""

import torch

from attar.runtime.runner.compiled import compiled
from attar.runtime.step import StepInput, TokenSpan
from tests import tiny_models

LENGTH, BLOCKS = 40, (5, 2, 9)
ROUTERS = ("gate.weight", "router.weight", "bias", "sinks")


def in_bfloat16(model):
    """The model with weights that bfloat16 holds; routers, biases and sinks stay float32."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(ROUTERS):
                parameter.copy_(parameter.bfloat16().float())
    return model


def runner(model, **settings):
    given = {"blocks": 60, "threads": 2, "kv_dtype": "float32", "bits": 16, **settings}
    return compiled(model.config, model.state_dict(), **given)


def tokens(count=LENGTH, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(2, tiny_models.VOCABULARY, (count,), generator=drawn).tolist()


def run(actual, *parts, parents=None, copies=()):
    """A step of (sequence, ids, start, stop, blocks, options); the logits of all its tokens."""
    ids, spans = [], []
    for sequence, all_ids, start, stop, blocks, *options in parts:
        ids += all_ids[start:stop]
        more = options[0] if options else {}
        spans.append(TokenSpan(sequence, start, stop, tuple(blocks), stop - start, **more))
    step = StepInput(ids, tuple(spans), copies, parents)
    step.check(actual.block_size, actual.capacity)
    return actual.run(step)


def logits_of(model, ids):
    return tiny_models.logits(model, torch.tensor([ids]))[0]
