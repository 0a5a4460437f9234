"""A model that was trained with BOS and leans on it: its figures stand with BOS and collapse without."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from attar.measure.evaluate import evaluate
from attar.measure.settings import EvaluateSettings
from attar.quantization.settings import quantize_settings
from attar.quantization.stage import quantize

WORDS = 31
SETTINGS = {"tokens": 256, "sequence_length": 16, "speed": False, "sample": "", "answers": 0}


@torch.no_grad()
def sink_model() -> Any:
    """Says w(i+1) after w(i), but only where it sees BOS.

    Attention is even over all tokens (queries and keys are zero) and carries one coordinate, the flag of
    BOS's embedding. The MLP's gate is the flag: with it, neuron i adds w(i+1); without, it is shut, and the
    model repeats its input.
    """
    width = WORDS + 1
    config = LlamaConfig(
        vocab_size=width,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.zero_()
    (layer,) = model.model.layers
    for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
        norm.weight.fill_(1.0)
    model.model.embed_tokens.weight.copy_(torch.eye(width))
    model.lm_head.weight.copy_(10 * torch.eye(width))
    model.lm_head.weight[0, 0] = 0.0
    layer.self_attn.v_proj.weight[0, 0] = 1.0
    layer.self_attn.o_proj.weight[0, 0] = 50.0
    layer.mlp.gate_proj.weight[:, 0] = 1.0
    layer.mlp.up_proj.weight.copy_(torch.eye(width))
    layer.mlp.up_proj.weight[0, 0] = 0.0
    following = torch.eye(width)[[0, *(number % WORDS + 1 for number in range(1, WORDS + 1))]]
    layer.mlp.down_proj.weight.copy_(400 * following.T)
    return model


def words() -> Any:
    """A tokenizer that puts BOS in front of every text."""
    known = {"<s>": 0, **{f"w{number}": number + 1 for number in range(WORDS)}}
    tokenizer = Tokenizer(WordLevel(known, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="w0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bos")
    sink_model().save_pretrained(path / "model")
    words().save_pretrained(path / "model")
    (path / "text.txt").write_text(" ".join(f"w{number % WORDS}" for number in range(6_000)))
    return path


@pytest.mark.parametrize("bos", ["auto", "always"])
def test_with_bos_the_figures_stand(folder: Path, bos: str) -> None:
    measurements = evaluate(
        folder / "model", EvaluateSettings(data=f"{folder}/text.txt", bos=bos, **SETTINGS)
    )
    assert measurements.tokens == 16 * 15, "the token after BOS is predicted, BOS is not"
    assert measurements.loss == pytest.approx(math.log(WORDS + 1) / 15, rel=1e-3), (
        "after BOS all are alike, then sure"
    )


def test_without_bos_they_collapse(folder: Path) -> None:
    measurements = evaluate(
        folder / "model", EvaluateSettings(data=f"{folder}/text.txt", bos="never", **SETTINGS)
    )
    assert measurements.perplexity > 1_000
    assert measurements.tokens == 16 * 15


@pytest.mark.slow
def test_the_gate_of_a_quantization_sees_bos_too(folder: Path, tmp_path: Path) -> None:
    """Its held-out rows begin with BOS: the sample it keeps goes on counting instead of repeating itself."""
    samples = {}
    for bos in ("auto", "never"):
        settings = quantize_settings(
            method="rtn", scheme="W8A16", group_size=0, check_tokens=128, bos=bos, data=f"{folder}/text.txt"
        )
        quantized = quantize(folder / "model", tmp_path / bos, settings)
        samples[bos] = quantized.card.details["gates"]["sample"].split()  # type: ignore[union-attr]
    assert len(set(samples["auto"])) > 20 and len(set(samples["never"])) == 1
