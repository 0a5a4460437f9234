"""A model with a prefix store: a second process answers as the first, from the blocks of its prompts."""

import pytest

from attar.errors import SettingsError
from attar.runtime.kv.evict import Streaming
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from tests.compiler import needs_compiler

PROMPT = [5 + index % 90 for index in range(70)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)


def answer(folder, prompt=PROMPT, **options):
    """Tokens with log-probabilities, and the cached tokens of a model that is loaded anew."""
    llm = LLM("attar:tiny", prefix_store=f"{folder}:1GB", kv_tokens=512, **options)
    sample = llm.generate([prompt], GREEDY)[0].samples[0]
    manager = llm.engine.scheduler.manager
    manager.store.close()
    manager.check()
    return (sample.token_ids, [token.logprob for token in sample.logprobs]), manager.stats.hit


@pytest.mark.parametrize(
    "options",
    [
        {"runner": "modules", "kv_dtype": "fp8"},
        pytest.param(
            {"runner": "compiled", "kv_dtype": "int4"},
            marks=needs_compiler,
        ),
    ],
)
def test_a_restart_answers_from_the_blocks_of_the_prompt(options, tmp_path):
    first, none = answer(tmp_path, **options)
    again, hit = answer(tmp_path, **options)
    assert (none, hit) == (0, 64) and again[0] == first[0]
    assert again[1] == pytest.approx(first[1], abs=1e-3)


def test_other_formats_are_other_blocks(tmp_path):
    answer(tmp_path, runner="modules", kv_dtype="int8")
    assert answer(tmp_path, runner="modules", kv_dtype="float32")[1] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefix_cache": False}, "prefix_cache is 'off'"),
        ({"eviction": Streaming(sinks=2, window=40)}, "eviction is 'Streaming'"),
        ({"kv_dtype": "kivi4"}, "KIVI's blocks change"),
        ({"embeddings": True}, "keys and values alone"),
    ],
)
def test_what_blocks_on_disk_do_not_have_is_refused(options, words, tmp_path):
    with pytest.raises(SettingsError, match=words):
        LLM("attar:tiny", prefix_store=str(tmp_path), **options)
