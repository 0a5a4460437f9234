"""The masked model computes what the cut model does: every structure, family and mixture of structures."""

import pytest
import torch

from attar.errors import ModelError
from attar.models.anatomy.discover import discover
from attar.models.classifiers import with_classifier
from attar.models.surgery.cut_model import cut_model, keep_hidden
from attar.models.surgery.cut_plan import CutPlan, heads_of_groups
from attar.models.surgery.masking import masked_units, stream_norms
from tests import tiny_models

GROUPED = ("llama3", "smollm", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
NARROW = (*GROUPED, "llama2")  # families whose config has the width of a head
RIGID = tuple(family for family in tiny_models.FAMILIES if family not in NARROW)


def some(total, count, seed):
    """Ascending random numbers below total."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(sorted(torch.randperm(total, generator=generator)[:count].tolist()))


def groups(anatomy, count):
    """Query heads of ``count`` KV heads, others in each block."""
    attentions = [block.attention for block in anatomy.blocks]
    return tuple(heads_of_groups(a, some(a.kv_heads, count, seed)) for seed, a in enumerate(attentions))


def queries(anatomy):
    """One query head of every KV head, another in each block."""
    size = anatomy.blocks[0].attention.heads // anatomy.blocks[0].attention.kv_heads
    kv_heads = anatomy.blocks[0].attention.kv_heads
    return tuple(tuple(g * size + (b + g) % size for g in range(kv_heads)) for b in range(3))


def neurons(anatomy, count):
    return tuple(some(block.mlp.neurons, count, block.index) for block in anatomy.blocks)


def plans(family, anatomy):
    """Plans that the family's config can say, by name."""
    kv_heads = anatomy.blocks[0].attention.kv_heads
    yield "neurons", CutPlan(neurons=neurons(anatomy, 33))
    yield "layers", CutPlan(layers=(0, 2))
    yield "neurons and layers", CutPlan(neurons=neurons(anatomy, 20), layers=(1, 2))
    if family in NARROW:
        yield "hidden", CutPlan(hidden=some(64, 40, 3))
        yield "heads", CutPlan(heads=groups(anatomy, kv_heads // 2))
        whole = CutPlan(groups(anatomy, kv_heads // 2), neurons(anatomy, 50), some(64, 48, 4), (0, 2))
        yield "all four", whole
    else:  # as many channels go as the heads had
        yield "heads and hidden", CutPlan(heads=groups(anatomy, 3), hidden=some(64, 48, 5))
    if family in GROUPED:
        yield "query heads", CutPlan(heads=queries(anatomy))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_the_masked_model_computes_what_the_cut_model_does(family):
    model = tiny_models.build(family)
    rows = tiny_models.tokens(model)
    whole = tiny_models.logits(model, rows)
    for name, plan in plans(family, discover(model)):
        cut = tiny_models.logits(cut_model(model, plan), rows)
        with masked_units(model, plan):
            masked = tiny_models.logits(model, rows)
        torch.testing.assert_close(masked, cut, rtol=0, atol=1e-5, msg=name)
        assert (masked - whole).abs().max() > 0.01, name
    assert torch.equal(tiny_models.logits(model, rows), whole)  # nothing of a mask is left


@pytest.mark.few(1)
@pytest.mark.parametrize("family", [*tiny_models.ENCODERS, "llama3", "gpt2"])
def test_a_masked_classifier_computes_what_the_cut_one_does(family):
    """Poolers and heads, too, lose the channels."""
    model = tiny_models.randomize(with_classifier(tiny_models.build(family), ["a", "b", "c"]))
    rows = tiny_models.tokens(model, batch=1)
    whole = tiny_models.logits(model, rows)
    for name, plan in plans(family, discover(model)):
        cut = cut_model(model, plan)
        with masked_units(model, plan):
            masked = tiny_models.logits(model, rows)
        torch.testing.assert_close(masked, tiny_models.logits(cut, rows), rtol=0, atol=1e-5, msg=name)
        assert (masked - whole).abs().max() > 0.01, name
        assert type(cut) is type(model) or family == "llama3", name


def test_a_norm_of_the_masked_model_sees_the_kept_channels_alone():
    """RMSNorm over D' of D channels: its mean square is D / D' as large, and so is its epsilon in the whole
    model: by hand, without hooks."""
    model, kept = tiny_models.build("llama2"), some(64, 40, 1)
    rows = tiny_models.tokens(model)
    with masked_units(model, CutPlan(hidden=kept)):
        masked = tiny_models.logits(model, rows)
    gone = [channel for channel in range(64) if channel not in kept]
    anatomy = discover(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, gone] = 0.0
        for block in anatomy.blocks:
            for part in (block.attention.o, block.mlp.down):
                model.get_submodule(part.name).weight[gone] = 0.0
        for name in stream_norms(model, anatomy):
            norm = model.get_submodule(name)
            norm.weight *= (40 / 64) ** 0.5
            norm.variance_epsilon *= 40 / 64
    torch.testing.assert_close(masked, tiny_models.logits(model, rows), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", RIGID)
def test_a_width_that_the_config_cannot_say_is_refused_by_name(family):
    with pytest.raises(ModelError, match="the residual stream cannot be 48 wide: no transformers") as e:
        keep_hidden(tiny_models.build(family), range(48))
    assert "remove heads with it" in e.value.hint and "\n" not in e.value.message


def test_neurons_that_differ_from_layer_to_layer_name_the_nearest_uniform_plan():
    uneven = CutPlan(neurons=(tuple(range(10)), tuple(range(20)), tuple(range(60))))
    with pytest.raises(ModelError, match=r"differ from block to block \(10 to 60\)") as caught:
        cut_model(tiny_models.build("llama3"), uneven)
    assert caught.value.hint == "the nearest uniform plan keeps 30 in each"


def test_query_heads_that_differ_between_kv_heads_are_refused():
    with pytest.raises(ModelError, match="its KV heads would keep different numbers of query heads"):
        cut_model(tiny_models.build("llama3"), CutPlan(heads=((0, 1, 2), (0, 1, 2), (0, 1, 2))))


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (CutPlan(hidden=(1, 0)), "kept hidden channels of block 0 must be ascending numbers from 0 to 63"),
        (CutPlan(hidden=()), "at least one"),
        (CutPlan(heads=((0,),)), "kept heads are given for 1 blocks, but the model has 3"),
        (CutPlan(layers=(3,)), "kept layers of block 0 must be"),
    ],
)
def test_a_plan_that_does_not_fit_the_model(plan, sentence):
    model = tiny_models.build("llama3")
    with pytest.raises(ModelError, match=sentence):
        cut_model(model, plan)
    with pytest.raises(ModelError, match=sentence), masked_units(model, plan):
        pass
