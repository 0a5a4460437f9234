"""Train ``attar:tiny``: tokenizer and model, from the running Python's standard-library source.

    python scripts/train_tiny.py WORK            writes src/attar/embedded/tiny
    python scripts/train_tiny.py WORK --family qwen2 --out DIR
                                                 a smaller model of another family, attar:tiny's tokenizer,
                                                 for the benchmarks
    python scripts/train_tiny.py WORK --family qwen3_moe
                                                 attar:tiny-moe, a mixture of experts that starts from
                                                 attar:tiny's weights, into attar's cache folder
    python scripts/train_tiny.py WORK --family qwen3_5
    python scripts/train_tiny.py WORK --family granitemoehybrid
                                                 attar:tiny-hybrid and attar:tiny-mamba, three layers in four
                                                 with a gated delta rule or Mamba 2, likewise

Kill it when you like; the same command goes on. Two phases: most tokens in rows of 512, the last ones in rows
of 2,048, which is the model's context. The card tells what came out.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from attar.checkpoint.card import Card, versions
from attar.checkpoint.hashing import cache_folder, sha256_file
from attar.data import python_text
from attar.data.packing import pack
from attar.progress import Terminal
from attar.walks.objectives import Loss
from attar.walks.settings import TrainSettings
from attar.walks.train import TrainHistory, train

VOCABULARY = 2048
NOTES = (
    "the phase of 512 was planned for 4,400 steps and shortened to 3,600 at step 1,500; "
    "a run of the script gives a model of the same kind, not the same bytes: threads and processors differ"
)
CONTEXT = 2048
SEED = 0
LONG = TrainSettings(
    steps=3600,
    batch_size=8,
    sequence_length=512,
    learning_rate=3e-3,
    optimizer="muon",
    warmup=0.02,
    min_lr_ratio=0.05,
    weight_decay=0.1,
    evaluate_every=400,
    checkpoint_every=100,
    data="python-stdlib",
    seed=SEED,
)
WIDE = replace(
    LONG,
    steps=300,
    batch_size=2,
    sequence_length=CONTEXT,
    learning_rate=3e-4,
    evaluate_every=150,
    seed=SEED + 1,
)
SIBLING = replace(LONG, steps=1500, evaluate_every=500)
MIXTURE = replace(LONG, steps=210, learning_rate=2e-3, evaluate_every=210, checkpoint_every=30)
HYBRID = replace(MIXTURE, steps=160, evaluate_every=160, checkpoint_every=20)
UPCYCLED = (0, 2, 5, 7)  # attar:tiny's layers that the mixture and the hybrids start from
BALANCE = 0.01  # of the load-balancing loss: Switch Transformers' (arXiv 2101.03961, section 2.2)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the training split; one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in python_text.texts("train")), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model() -> LlamaForCausalLM:
    """A Llama of 6.8 M parameters: 8 layers, width 256, 8 query heads on 4 KV heads, SwiGLU of 768."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    return LlamaForCausalLM(config)


def build_sibling() -> Qwen2ForCausalLM:
    """A Qwen2 of 3.0 M parameters: 6 layers, width 192, 6 query heads on 2 KV heads with biases, SwiGLU of
    512."""
    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    return Qwen2ForCausalLM(config)


def build_mixture(embedded: Path) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE of 7.6 M parameters, 2.9 M of them active: 4 layers, width 256, 8 query heads on 4 KV
    heads, 8 experts of width 256, two for each token. All widths are multiples of llama.cpp's blocks."""
    torch.manual_seed(SEED)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=BALANCE,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    model = Qwen3MoeForCausalLM(config)
    upcycle(model, LlamaForCausalLM.from_pretrained(embedded, dtype=torch.float32))
    return model


@torch.no_grad()
def upcycle(model: Qwen3MoeForCausalLM, dense: LlamaForCausalLM) -> None:
    """Start from a dense model (Komatsuzaki et al. 2022, arXiv 2212.05055): embedding, norms and attention
    are its own, each expert is a random third of a layer's neurons, their outputs times 3; random routers."""
    model.model.embed_tokens.load_state_dict(dense.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(dense.model.norm.state_dict())
    generator = torch.Generator().manual_seed(SEED)
    for layer, index in zip(model.model.layers, UPCYCLED, strict=True):
        source = dense.model.layers[index]
        layer.self_attn.load_state_dict(source.self_attn.state_dict(), strict=False)  # no norms of q and k
        layer.input_layernorm.load_state_dict(source.input_layernorm.state_dict())
        layer.post_attention_layernorm.load_state_dict(source.post_attention_layernorm.state_dict())
        nn.init.normal_(layer.mlp.gate.weight, std=model.config.initializer_range, generator=generator)
        neurons, width = source.mlp.up_proj.out_features, model.config.moe_intermediate_size
        for expert in range(model.config.num_experts):
            rows = torch.randperm(neurons, generator=generator)[:width]
            gate, up = source.mlp.gate_proj.weight[rows], source.mlp.up_proj.weight[rows]
            layer.mlp.experts.gate_up_proj[expert] = torch.cat([gate, up])
            layer.mlp.experts.down_proj[expert] = source.mlp.down_proj.weight[:, rows] * (neurons / width)


HYBRID_SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}


def build_delta(dense: LlamaForCausalLM) -> Qwen3_5ForCausalLM:
    """A Qwen3.5 of 4.0 M parameters: three layers with a gated delta rule (8 value heads of 32 on 4 key
    heads of 32) and one with attention; embedding and MLPs start as a dense model's."""
    torch.manual_seed(SEED)
    config = Qwen3_5TextConfig(
        **HYBRID_SIZE,
        head_dim=32,
        linear_num_value_heads=8,
        linear_num_key_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    )
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for layer, index in zip(model.model.layers, UPCYCLED, strict=True):
            layer.mlp.load_state_dict(dense.model.layers[index].mlp.state_dict())
    return model


def build_mamba(dense: LlamaForCausalLM) -> GraniteMoeHybridForCausalLM:
    """A Granite 4 of 4.3 M parameters without experts: three layers with Mamba 2 (8 heads of 64, states of
    32) and one with attention without positions; embedding and MLPs start as a dense model's."""
    torch.manual_seed(SEED)
    config = GraniteMoeHybridConfig(
        **HYBRID_SIZE,
        num_local_experts=0,
        shared_intermediate_size=768,
        attention_multiplier=32**-0.5,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_d_state=32,
        mamba_chunk_size=64,
    )
    model = GraniteMoeHybridForCausalLM(config)
    with torch.no_grad():
        for layer, index in zip(model.model.layers, UPCYCLED, strict=True):
            mlp = dense.model.layers[index].mlp
            layer.shared_mlp.input_linear.weight.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
            layer.shared_mlp.output_linear.weight.copy_(mlp.down_proj.weight)
    return model


def build_hybrid(build: Callable[[LlamaForCausalLM], nn.Module], embedded: Path) -> nn.Module:
    """A hybrid that starts from attar:tiny, but for what mixes tokens."""
    dense = LlamaForCausalLM.from_pretrained(embedded, dtype=torch.float32)
    model = build(dense)
    model.model.embed_tokens.load_state_dict(dense.model.embed_tokens.state_dict())
    return model


HYBRIDS = {"qwen3_5": ("tiny-hybrid", build_delta), "granitemoehybrid": ("tiny-mamba", build_mamba)}


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Next-token cross-entropy in nats, mean over tokens."""
    return _cross_entropy(model(input_ids=tokens).logits, tokens)


def balanced_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """``loss``, and :data:`BALANCE` times each layer's load-balancing loss, mean over layers."""
    output = model(input_ids=tokens, output_router_logits=True)
    experts, active = model.config.num_experts, model.config.num_experts_per_tok
    layers = [load_balancing_loss_func((logits,), experts, active) for logits in output.router_logits]
    return _cross_entropy(output.logits, tokens) + BALANCE * torch.stack(layers).mean()


def _cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def phase(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    settings: TrainSettings,
    work: Path,
    what: str,
    objective: Loss = loss,
) -> TrainHistory:
    """One phase of training, with its held-out cross-entropy on rows of the same length."""
    length = settings.sequence_length
    rows = pack(tokenizer, "python-stdlib", "train", length=length, rows=None, seed=settings.seed).rows
    kept = pack(tokenizer, "python-stdlib", "evaluation", length=length, rows=None, seed=0).rows
    evaluation = kept[: 65_536 // settings.sequence_length]
    print(f"{what}: {rows.numel():,} training tokens in a pass over the data", file=sys.stderr)

    def held_out(model: nn.Module) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            return sum(float(loss(model, batch)) * len(batch) for batch in evaluation.split(8)) / len(
                evaluation
            )

    return train(
        model, objective, rows, settings, work=work, held_out=held_out, progress=Terminal(), what=what
    )


def main() -> None:
    """Tokenizer, two phases, checkpoint, card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    embedded = Path(__file__).parents[1] / "src/attar/embedded/tiny"
    parser.add_argument("--family", choices=("llama", "qwen2", "qwen3_moe", *HYBRIDS), default="llama")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.family == "qwen2":
        if args.out is None:
            parser.error("--family qwen2 needs --out")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(embedded)
        sibling = build_sibling()
        phase(sibling, tokenizer, SIBLING, args.work / "sibling", "qwen2")
        sibling.to(torch.bfloat16).save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
        return
    if args.family == "qwen3_moe":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(embedded)
        out = args.out or cache_folder() / "tiny-moe"
        mixture = build_mixture(embedded)
        work = args.work / "mixture-long"
        history = phase(mixture, tokenizer, MIXTURE, work, "mixture", balanced_loss)
        save(mixture, tokenizer, out)
        notes = (
            f"starts from attar:tiny's layers {', '.join(map(str, UPCYCLED))} (embedding, norms, attention;"
            f" an expert is a third of a layer's neurons); load-balancing loss times {BALANCE}"
        )
        write_card(out, "attar:tiny-moe", [(MIXTURE, history)], "--family qwen3_moe", notes)
        return
    if args.family in HYBRIDS:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(embedded)
        name, build = HYBRIDS[args.family]
        hybrid = build_hybrid(build, embedded)
        history = phase(hybrid, tokenizer, HYBRID, args.work / name, name)
        out = args.out or cache_folder() / name
        save(hybrid, tokenizer, out)
        layers = ", ".join(map(str, UPCYCLED))
        notes = f"embedding and MLPs start as those of attar:tiny's layers {layers}"
        write_card(out, f"attar:{name}", [(HYBRID, history)], f"--family {args.family}", notes)
        return
    args.out = args.out or embedded
    if (args.work / "tokenizer/tokenizer.json").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.work / "tokenizer")
    else:
        tokenizer = build_tokenizer()
        tokenizer.save_pretrained(args.work / "tokenizer")
    model = build_model()
    first = phase(model, tokenizer, LONG, args.work / "long", "rows of 512")
    second = phase(model, tokenizer, WIDE, args.work / "wide", "rows of 2,048")
    save(model, tokenizer, args.out)
    write_card(args.out, "attar:tiny", [(LONG, first), (WIDE, second)], "", NOTES)


def save(model: nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Weights in bf16, config and tokenizer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def write_card(
    folder: Path, name: str, phases: list[tuple[TrainSettings, TrainHistory]], options: str, notes: str
) -> None:
    """The card: script, data rule, seed, settings, tokens seen, held-out losses."""
    losses = {settings.sequence_length: _held_out(history)[-1]["held_out"] for settings, history in phases}
    Card(
        name=name,
        stage="original",
        settings={f"rows_of_{settings.sequence_length}": asdict(settings) for settings, _ in phases},
        seed=SEED,
        versions=versions(),
        files={
            path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.name != "attar.json"
        },
        measurements={
            **{f"held_out_loss_{length}": loss for length, loss in losses.items()},
            f"held_out_perplexity_{max(losses)}": math.exp(losses[max(losses)]),
            "tokens_seen": sum(history.tokens for _, history in phases),
        },
        details={
            "data": "python-stdlib: files whose path's SHA-256 (first 32 bits) modulo 100 is below 90",
            "notes": notes,
        },
        licence={"ids": ["apache-2.0"]},
        command=f"python scripts/train_tiny.py WORK {options}".rstrip(),
    ).write(folder)


def _held_out(history: TrainHistory) -> list[dict[str, float]]:
    return [row for row in history.curve if "held_out" in row]


if __name__ == "__main__":
    main()
