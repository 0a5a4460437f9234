"""Tiny models made in memory, and tokenizers of whole words."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def llama(seed: int, vocabulary: int = 64, **config: Any) -> Any:
    """A random Llama of about 10 k parameters in evaluation mode."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,
    }
    return LlamaForCausalLM(
        LlamaConfig(
            **{**sizes, "vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None, **config}
        )
    ).eval()


def words(*texts: str, size: int = 64) -> Any:
    """A tokenizer of whole words: ``w0`` to ``w{size - 1}``, or the given ones."""
    vocabulary = list(texts) or [f"w{number}" for number in range(size)]
    tokenizer = Tokenizer(
        WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token=vocabulary[0])
    )
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=vocabulary[0])
