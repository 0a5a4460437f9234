"""attar:draft, the model that drafts for attar:tiny: it agrees with it near the start of a text and far into
it, and texts stay those of attar:tiny."""

import pytest
import torch

from attar.data.packing import pack
from attar.distillation.objectives.overlap import acceptance
from attar.measure.speculation.profile import FixedPolicy
from attar.models.loading.load import load_model, load_tokenizer
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams


@pytest.mark.slow
def test_it_agrees_along_the_whole_context():
    """A student of rows of 256 tokens falls from 0.70 to 0.28 behind token 1,024; this one must not."""
    rows = pack(load_tokenizer("attar:tiny"), "python-stdlib", "evaluation", length=2048, rows=2, seed=0).rows
    target, draft = (load_model(f"attar:{name}", dtype=torch.float32) for name in ("tiny", "draft"))
    with torch.no_grad():
        a = acceptance(draft(input_ids=rows).logits, target(input_ids=rows).logits)
    for part in (a[:, :256], a[:, 256:1024], a[:, 1024:]):
        assert part.mean() > 0.55


def test_it_drafts_and_the_text_is_that_of_plain_decoding():
    prompts = ["import os\n\n\ndef main(", "class Reader:\n    def __init__("]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    plain = [result.token_ids for result in LLM("attar:tiny", kv_tokens=512).generate(prompts, params)]
    llm = LLM("attar:tiny", draft="attar:draft", kv_tokens=512)
    llm.engine.speculator.policy = FixedPolicy(3)  # whether that pays or not
    assert [result.token_ids for result in llm.generate(prompts, params)] == plain
    counts = llm.engine.speculator.counts
    assert counts.accepted > 0.4 * counts.drafted > 0
