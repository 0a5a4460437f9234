"""Linear recurrences in the compiled step: what test_states.py does not ask of every runner."""

import pytest
import torch

from attar.errors import ModelError
from attar.kernels.structures import CarriedSpan, StepTokens
from attar.runtime.loading import load
from attar.runtime.runner.compiled import Compiled, compiled
from attar.runtime.runner.compiled_states import StateBuffers
from attar.runtime.runner.compiled_weights import check_config, llama_name
from attar.runtime.runner.lora import LoraAdapter, LoraUpdate
from attar.runtime.runner.recurrent_weights import names
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.marks import slow_but
from tests.quantization.packing import pack
from tests.runtime.runner.compiled_steps import BLOCKS, LENGTH, in_bfloat16, logits_of, run, runner, tokens
from tests.runtime.test_loading import logits as logits_of_runner

pytestmark = needs_compiler


def built(family="qwen3_5", **changes):
    return in_bfloat16(tiny_models.build(family, **changes))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "granitemoehybrid", "falcon_h1"])
@pytest.mark.parametrize(
    "settings", [{"bits": 8, "kv_dtype": "bfloat16"}, {"weights": "int4", "group": 16, "kv_dtype": "int4"}]
)
def test_a_token_does_not_depend_on_its_batch(family, settings):
    """Bit by bit: alone, in chunks, as drafts or with others, with any number of threads."""
    model, ids, other = built(family), tokens(), tokens(seed=7)
    alone = runner(model, threads=1, **settings)
    want = torch.cat([run(alone, (0, ids, at, at + 1, BLOCKS)) for at in range(LENGTH)])
    busy = runner(model, threads=3, **settings)
    first = run(busy, (1, other, 0, 32, (0, 1)), (0, ids, 0, 33, BLOCKS))[32:]
    second = run(busy, (0, ids, 33, 37, BLOCKS, {"drafts": 3}), (1, other, 32, 33, (0, 1, 3)))[:-1]
    third = run(busy, (0, ids, 35, LENGTH, BLOCKS))  # two drafts were rejected
    assert torch.equal(torch.cat([first, second[:2], third]), want)


GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4}
GRANITE |= {"logits_scaling": 2.0, "mamba_n_groups": 2, "mamba_d_state": 32}
GRANITE |= {"mamba_n_heads": 4, "mamba_d_head": 32}
DENSE = {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_conv_bias": False}
DENSE |= {"mamba_d_conv": 2}
FALCON = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.3, "key_multiplier": 0.7}
FALCON |= {"attention_in_multiplier": 0.8, "attention_out_multiplier": 1.3, "mlp_multipliers": [0.9, 0.6]}
FALCON |= {"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.4, 0.7, 1.4, 0.5, 0.9]}
FALCON |= {"mamba_n_groups": 2, "num_hidden_layers": 2}
BIASED = {"attention_bias": True, "mlp_bias": True, "projectors_bias": True, "mamba_proj_bias": True}
NEMOTRON = {"n_groups": 2, "time_step_min": 0.3, "use_bias": True, "mlp_bias": True}
NEMOTRON |= {"layers_block_type": ["mlp", "full_attention", "linear_attention"]}
QUANTIZED = ("qwen3_5", "granitemoehybrid", "qwen3_next", "qwen3_5_moe", "mamba2", "bamba", "falcon_h1")
QUANTIZED += ("nemotron_h", "nemotron_h_moe")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_5", {"linear_num_value_heads": 2, "linear_value_head_dim": 48, "linear_conv_kernel_dim": 2}),
        ("qwen3_5", {"linear_key_head_dim": 32, "layer_types": ["linear_attention"] * 3}),
        ("granitemoehybrid", GRANITE),
        ("granitemoehybrid", {**GRANITE, **DENSE, "mamba_proj_bias": True, "time_step_limit": (0.5, 0.9)}),
        ("falcon_h1", FALCON | BIASED),
        ("falcon_h1", FALCON | {"mamba_rms_norm": True}),
        ("falcon_h1", FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
        ("nemotron_h", NEMOTRON),
        ("nemotron_h_moe", {}),
    ],
)
def test_other_shapes(family, changes):
    model, ids = built(family, **changes), tokens()
    actual = runner(model, threads=3)
    rows = [run(actual, (0, ids, a, b, BLOCKS)) for a, b in ((0, 1), (1, 3), (3, 30), (30, 40))]
    with torch.no_grad():
        want = model(torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(torch.cat(rows), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", slow_but(QUANTIZED, "qwen3_5"))
def test_a_quantized_checkpoint_runs_as_its_modules(tmp_path, family):
    """Products in their codes, whose rows are sorted."""
    changes = {"granitemoehybrid": {"num_local_experts": 0, "intermediate_size": 64}}
    changes |= {"falcon_h1": FALCON}
    folder = tiny_models.save(
        built(family, **changes.get(family, {})), tmp_path / "model", dtype=torch.bfloat16
    )
    checkpoint = pack(folder, tmp_path / "packed", scheme="W4A16")[1]
    settings = {"activations": 16, "kv_dtype": "float32", "kv_tokens": 64}
    ours, modules = (load(checkpoint, runner=name, **settings).runner for name in ("auto", "modules"))
    assert isinstance(ours, Compiled)
    assert all(packed.kind != "bf16" for layer in ours.weights.layers for packed in layer.products)
    want = logits_of_runner(modules, tokens(24))
    modules.forget(0), ours.forget(0)
    torch.testing.assert_close(
        logits_of_runner(ours, tokens(24)), want, rtol=0, atol=4e-3 * float(want.abs().max())
    )


@pytest.mark.parametrize(
    ("family", "module", "prefix"),
    [
        ("qwen3_next", "linear_attn.in_proj_qkvz", "model."),
        ("falcon_h1", "mamba.in_proj", "model."),
        ("nemotron_h", "mixer.in_proj", "backbone."),
    ],
)
def test_an_adapter_changes_the_layers_of_its_own_sequence(family, module, prefix):
    """Logits are those of the merged weight, of rows that are sorted or have factors, beside a sequence
    without it."""
    changes = FALCON if family == "falcon_h1" else {}
    model, ids, path = built(family, **changes), tokens(), f"model.layers.0.{module}"
    drawn = torch.Generator().manual_seed(0)
    A, B = torch.randn(4, 64, generator=drawn), torch.randn(64, 4, generator=drawn)
    B = B.repeat(6, 1)[: len(model.get_submodule(path).weight)]
    adapter = LoraAdapter("name", {path: LoraUpdate(A, B)}, "digest")
    folder = {name.replace("model.", prefix, 1): tensor for name, tensor in model.state_dict().items()}
    actual = runner(model)

    def build(names, read):
        return compiled(model.config, {name: read(name) for name in names}, blocks=1).weights

    actual.with_adapters(build, folder, folder.__getitem__)
    actual.lora.add("key", actual.lora.prepare(adapter))
    parts = [(0, ids, BLOCKS, {}), (1, ids, (0, 1, 3), {"adapter": "key"})]
    rows = [
        run(actual, *((number, row, a, b, blocks, more) for number, row, blocks, more in parts)).chunk(2)
        for a, b in ((0, 9), (9, 10), (10, LENGTH))
    ]
    merged = built(family, **changes)
    with torch.no_grad():
        weight = merged.get_submodule(path).weight
        weight.copy_((weight + B @ A).bfloat16().float())
    for index, each in enumerate((model, merged)):
        ours = torch.cat([chunks[index] for chunks in rows])
        torch.testing.assert_close(ours, logits_of(each, ids), rtol=0, atol=1e-3)


def test_names_of_granites_experts():
    """In memory, as its checkpoints stack them, and one by one, as they are rounded."""
    patterns = names(tiny_models.config("granitemoehybrid"))
    for stored, name in {
        "router.weight": "mlp.gate.weight",
        "router.layer.weight": "mlp.gate.weight",
        "experts.gate_up_proj": "mlp.experts.gate_up_proj",
        "input_linear.weight": "mlp.experts.gate_up_proj",
        "output_linear.weight": "mlp.experts.down_proj",
        "experts.3.up_proj.weight": "mlp.experts.3.up_proj.weight",
    }.items():
        assert llama_name(f"model.layers.0.block_sparse_moe.{stored}", patterns) == f"model.layers.0.{name}"


def test_states_in_memory():
    """Two layers of 4 heads of 16 x 16 numbers, and 3 inputs of 128 channels and 8 steps."""
    assert runner(built()).state_bytes == 4 * 2 * (4 * 16 * 16 + 3 * (128 + 8))
    buffers = StateBuffers(100)
    first, second = buffers.take(), buffers.take()
    place = first.data_ptr()
    del first
    assert buffers.take().data_ptr() == place != second.data_ptr()


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("falcon_h1", {"hidden_act": "gelu_pytorch_tanh"}, "convolutions have silu"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "no activation 'silu without a gate'"),
        ("nemotron_h", {"moe_latent_size": 32}, "experts of latents"),
    ],
)
def test_variants_that_are_refused(family, changes, words):
    with pytest.raises(ModelError, match=words):
        check_config(tiny_models.config(family, **changes))


def test_what_is_out_of_bounds_or_refused(tmp_path):
    model = built()
    actual = runner(model)
    weights = actual.weights
    given = {
        "ids": [5],
        "positions": [0],
        "slots": [0],
        "counts": [1],
        "past": [0],
        "blocks": [[0]],
        "rows": [0],
    }
    states = torch.empty(weights.state_numbers)
    for part in (
        CarriedSpan(again=1),
        CarriedSpan(saves=[(2, states)]),
        CarriedSpan(saves=[(1, states), (0, states)]),
    ):
        with pytest.raises(IndexError, match="states"):
            actual._program.run(StepTokens(**given, carried=[part]))
    with pytest.raises(AssertionError, match="of states, not"):
        actual._program.run(StepTokens(**given, carried=[CarriedSpan(states=states[1:])]))
    with pytest.raises(ModelError, match="multiples of 16"):
        runner(built(linear_value_head_dim=24))
    folder = tiny_models.save(model, tmp_path / "model", dtype=torch.bfloat16)
    with pytest.raises(ModelError, match="linear recurrences"):
        load(folder, runner="device", kv_tokens=64)
