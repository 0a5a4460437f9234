"""Which models' residual streams can be rotated, and who reads and writes them."""

import pytest

from attar.errors import ModelError
from attar.models.anatomy.residual import residual
from tests import tiny_models as tiny

RMS = ("llama2", "llama3", "smollm", "mistral", "qwen2", "qwen3", "phi3")
LAYERNORM = ("gpt2", "opt", "gpt_neox")
REFUSED = {
    "gemma2": "post_attention_layernorm does not feed Linears alone",
    "gemma3": "post_attention_layernorm does not feed Linears alone",
    "bert": "no final norm",
    "roberta": "no final norm",
    "distilbert": "no final norm",
}


@pytest.mark.few(3)
@pytest.mark.parametrize("family", RMS + LAYERNORM)
def test_pre_norm_families_rotate(family):
    facts = residual(tiny.build(family))
    assert facts.centred == (family in LAYERNORM)
    assert len(facts.norms) == 7 and len(facts.writers) == 6 and len(facts.values) == 3
    assert facts.norms[-1].readers[0].endswith(("lm_head", "embed_out"))


@pytest.mark.parametrize("family", REFUSED)
def test_others_are_refused_in_one_line(family):
    with pytest.raises(ModelError) as caught:
        residual(tiny.build(family))
    assert REFUSED[family] in caught.value.message and "\n" not in caught.value.message


def test_every_family_is_decided():
    assert {*RMS, *LAYERNORM, *REFUSED} == set(tiny.FAMILIES)


def test_what_is_tied_and_embedded():
    assert residual(tiny.build("smollm")).tied and not residual(tiny.build("llama2")).tied
    assert residual(tiny.build("gpt2")).embeddings == ("transformer.wte", "transformer.wpe")


def test_something_before_the_blocks_is_refused():
    """BLOOM has a norm on its embedding."""
    import transformers

    sizes = {**tiny.SHARED, "hidden_size": 64, "n_layer": 2, "n_head": 4}
    model = transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))
    with pytest.raises(ModelError, match="word_embeddings_layernorm"):
        residual(model)
