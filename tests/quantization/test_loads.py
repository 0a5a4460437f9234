"""Who loads the result: what attar says of transformers is what transformers does, family by family."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from attar.errors import SettingsError
from attar.models.loading.load import load_model
from attar.quantization.plan import READS_WEIGHTS
from attar.quantization.settings import quantize_settings
from attar.quantization.stage import quantize
from attar.quantization.write import CONV1D, ORDERED, READS, YES
from tests import tiny_models
from tests.log_lines import LogLines
from tests.marks import slow_but

TEXT = str(Path(json.__file__).parent)
QUICK = {"method": "rtn", "check_tokens": 0, "data": TEXT, "samples": 2, "sequence_length": 32}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 128}
MORE = {  # families beyond tests/tiny_models.py that transformers runs in a way of their own
    "falcon": ("FalconConfig", "FalconForCausalLM", {**SMALL, "multi_query": False}),
    "gpt_bigcode": (
        "GPTBigCodeConfig",
        "GPTBigCodeForCausalLM",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    ),
    "nanochat": ("NanoChatConfig", "NanoChatForCausalLM", {**tiny_models.GQA, "head_dim": 8}),
}
FAMILIES = [*(family for family in tiny_models.DECODERS if family != "llama2"), *MORE]


class Heard(LogLines):
    def __init__(self):
        super().__init__()
        self.tasks = []

    def task(self, what, total, done=0):
        self.tasks.append((what, total))
        return super().task(what, total, done)


def dense(family, folder, **changes):
    if family not in MORE:
        return tiny_models.save(tiny_models.build(family, **changes), folder, dtype=torch.bfloat16)
    config, model, arguments = MORE[family]
    result = getattr(transformers, config)(**{**tiny_models.SHARED, **arguments})
    result.architectures = [model]
    return tiny_models.save(
        tiny_models.randomize(getattr(transformers, model)(result)).eval(), folder, dtype=torch.bfloat16
    )


@torch.no_grad()
def logits(model):
    tokens = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(5))
    return model.eval()(input_ids=tokens, use_cache=False).logits


def transformers_runs(checkpoint):
    """Whether transformers loads a checkpoint and gives attar's logits."""
    try:
        theirs = logits(AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.bfloat16))
    except (AttributeError, ValueError):
        return False
    return torch.equal(theirs, logits(load_model(checkpoint)))


@pytest.mark.few(4)
@pytest.mark.parametrize("family", slow_but(FAMILIES, "llama3", "gpt2", *MORE))
def test_transformers_loads_exactly_what_is_reported(family, tmp_path):
    progress = Heard()
    quantized = quantize(
        dense(family, tmp_path / "dense"), tmp_path / "out", quantize_settings(**QUICK), progress=progress
    )
    fields = quantized.card.details["loads_in"]["transformers"]
    assert (fields == YES) == transformers_runs(quantized) == (family != "gpt2"), fields
    assert [line for line in progress.lines if "transformers" in line] == (
        [f"note: transformers: {CONV1D}"] if family == "gpt2" else []
    )
    config = quantized.config["quantization_config"]
    assert config.get("dequantize", False) == (family in READS_WEIGHTS)
    if family in READS_WEIGHTS:  # without the word it does not load: the table holds no family for nothing
        path = quantized.path / "config.json"
        path.write_text(
            json.dumps({**quantized.config, "quantization_config": {**config, "dequantize": False}})
        )
        assert not transformers_runs(quantized)


def test_a_family_that_reads_weights_and_two_schemes_do_not_go_together(tmp_path):
    settings = quantize_settings(overrides=("re:dense_4h_to_h$=W8A16",), **QUICK)
    quantized = quantize(dense("falcon", tmp_path / "dense"), tmp_path / "out", settings)
    assert quantized.card.details["loads_in"]["transformers"] == READS and not transformers_runs(quantized)


def test_table_of_the_documents():
    page = (Path(__file__).parents[2] / "docs/quantize.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| Falcon"))
    names = {"falcon": "Falcon", "gpt_bigcode": "GPT-BigCode", "nanochat": "nanochat"}
    assert set(names) == set(READS_WEIGHTS) and all(name in row for name in names.values())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("changes", "vllm"),
    [
        ({"scheme": "W3A16"}, "packed codes of 4 or 8 bits"),
        ({"scheme": "W6A16"}, "packed codes of 4 or 8 bits"),
        ({"scheme": "NF4"}, "bitsandbytes"),
        ({"scheme": "W4A16", "overrides": ("down_proj=W2A16",)}, "down_proj has 2 bits"),
        ({"scheme": "W4A16", "method": "gptq", "act_order": "group"}, ORDERED),
        ({"scheme": "W4AFP8"}, "groups of 128 alone"),
        ({"scheme": "W4A16"}, None),
        ({"scheme": "W8A8"}, None),
    ],
)
def test_what_vllm_has_no_kernel_for_is_reported_before_the_work(changes, vllm, tmp_path):
    progress = Heard()
    folder = dense("llama3", tmp_path / "dense", intermediate_size=128)
    quantized = quantize(
        folder, tmp_path / "out", quantize_settings(**{**QUICK, **changes}), progress=progress
    )
    notes = [line for line in progress.lines if line.startswith("note: vllm")]
    assert len(notes) == (vllm is not None) and all(vllm in note for note in notes)
    assert (vllm or "nothing known against it") in quantized.card.details["loads_in"]["vllm"]


def test_the_group_size_that_fits_is_chosen_and_recorded(tmp_path):
    """64 inputs, down_proj 96: 32 for all."""
    folder = dense("llama3", tmp_path / "dense")
    quantized = quantize(folder, tmp_path / "out", quantize_settings(overrides=("down_proj=W8A16",), **QUICK))
    assert quantized.card.details["group_sizes"] == {"W4A16": 64, "W8A16": 32}
    alone = quantize(folder, tmp_path / "alone", quantize_settings(**QUICK))
    assert alone.card.details["group_sizes"] == {"W4A16": 32}
    with pytest.raises(SettingsError, match=r"group_size is 128.*32 or 16 fits"):
        quantize(folder, tmp_path / "wrong", quantize_settings(group_size=128, **QUICK))


def test_the_check_says_how_far_it_is(tmp_path):
    """Between packing and the end there was silence: minutes of it on a real model."""
    progress = Heard()
    settings = quantize_settings(**{**QUICK, "check_tokens": 64})
    quantize(dense("llama3", tmp_path / "dense"), tmp_path / "out", settings, progress=progress)
    pack, compare, sample = progress.tasks[-3:]
    assert pack == ("pack", 30) and sample == ("sample", 1)
    assert compare[0] == "compare" and compare[1] > 3  # three blocks, and the head as the blocks it takes
