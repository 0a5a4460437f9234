"""What the tiny checkpoints of this room's tests are made of."""

from __future__ import annotations

import torch

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def llama_tensors(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of a two-layer Llama: 8 wide, 4 heads over 2 KV heads, 16 neurons, 32 tokens, tied head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (8,),
            prefix + "post_attention_layernorm.weight": (8,),
            prefix + "self_attn.q_proj.weight": (8, 8),
            prefix + "self_attn.k_proj.weight": (4, 8),
            prefix + "self_attn.v_proj.weight": (4, 8),
            prefix + "self_attn.o_proj.weight": (8, 8),
            prefix + "mlp.gate_proj.weight": (16, 8),
            prefix + "mlp.up_proj.weight": (16, 8),
            prefix + "mlp.down_proj.weight": (8, 16),
        }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
