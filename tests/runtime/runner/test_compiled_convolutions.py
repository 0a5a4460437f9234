"""Short convolutions (LFM2) in the compiled step: what test_states.py does not ask of every runner."""

import pytest
import torch

from attar.errors import ModelError
from attar.kernels.packed import unpack
from attar.kernels.structures import StepTokens
from attar.runtime.kv.state_store import StateStore
from attar.runtime.loading import load
from attar.runtime.runner.compiled import Compiled, compiled
from attar.runtime.runner.compiled_states import WINDOW, WalkedSpan
from attar.runtime.runner.compiled_weights import llama_name
from attar.runtime.runner.convolution_weights import NAMES
from attar.runtime.runner.lora import LoraAdapter, LoraUpdate
from attar.runtime.step import StepInput, TokenSpan
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.marks import slow_but
from tests.quantization.packing import pack
from tests.runtime.runner.compiled_steps import BLOCKS, LENGTH, in_bfloat16, logits_of, run, runner, tokens
from tests.runtime.test_loading import logits as logits_of_runner

pytestmark = needs_compiler


def built(family="lfm2", **changes):
    return in_bfloat16(tiny_models.build(family, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"conv_L_cache": 5, "conv_bias": True},
        {"conv_L_cache": 2, "layer_types": ["full_attention", "conv", "conv"]},
    ],
)
def test_other_widths_and_biases(changes):
    model, ids = built(**changes), tokens()
    actual = runner(model, threads=3)
    rows = [run(actual, (0, ids, a, b, BLOCKS)) for a, b in ((0, 1), (1, 3), (3, 30), (30, 40))]
    torch.testing.assert_close(torch.cat(rows), logits_of(model, ids), rtol=0, atol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["lfm2", "lfm2_moe"])
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


def test_a_model_of_convolutions_alone():
    model, ids = built(layer_types=["conv"] * 3), tokens()
    rows = [run(runner(model), (0, ids, 0, 30, BLOCKS))]
    with torch.no_grad():
        want = model(torch.tensor([ids[:30]]), use_cache=False).logits[0]
    torch.testing.assert_close(rows[0], want, rtol=0, atol=1e-4)


def test_a_convolution_takes_no_room_of_keys_and_values():
    model = built()
    one, all_layers = runner(model), runner(built(layer_types=["full_attention"] * 3))
    pools = [len(each.read_block(0)) for each in (one, all_layers)]
    assert 3 * pools[0] == pools[1] and one.state_bytes == 2 * 2 * 64 * 4


def test_blocks_of_attention_are_copied_moved_and_stored():
    """Layer 1 of 3 is the pool's first."""
    model, ids = built(), tokens()
    actual = runner(model)
    run(actual, (0, ids, 0, 20, (0, 1)))
    content = actual.read_block(1)
    actual.write_block(7, content)
    want = logits_of(model, ids)[20]
    torch.testing.assert_close(run(actual, (0, ids, 20, 21, (0, 7)))[0], want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("weights", slow_but(("int4", "int8"), "int4"))
def test_codes_are_those_of_the_weights(weights):
    """Against transformers with the rounded weights in their places."""
    model, ids = built(), tokens()
    actual = runner(model, weights=weights, group=16)
    with torch.no_grad():
        model.lm_head.weight.copy_(unpack(actual.weights.head))
        for layer, packed in zip(model.model.layers, actual.weights.layers, strict=True):
            if packed.convolution is None:
                layers = [getattr(layer.self_attn, f"{name}_proj") for name in "qkv"]
                last = layer.self_attn.out_proj
            else:
                layers, last = [layer.conv.in_proj], layer.conv.out_proj
            mlp = [layer.feed_forward.w1, layer.feed_forward.w3]
            for modules, part in ((layers, packed.qkv), ([last], packed.out), (mlp, packed.gate_up)):
                rows = unpack(part).split([len(module.weight) for module in modules])
                for module, weight in zip(modules, rows, strict=True):
                    module.weight.copy_(weight)
            layer.feed_forward.w2.weight.copy_(unpack(packed.down))
        model.model.embed_tokens.weight.copy_(actual.weights.embedding.float())
    want = torch.nn.functional.linear(  # the head is tied, and rounded for itself
        model.model(torch.tensor([ids])).last_hidden_state[0], unpack(actual.weights.head)
    )
    torch.testing.assert_close(run(actual, (0, ids, 0, LENGTH, BLOCKS)), want, rtol=0, atol=2e-3)


@pytest.mark.parametrize("family", slow_but(("lfm2", "lfm2_moe"), "lfm2"))
def test_a_quantized_checkpoint_runs_as_its_modules(tmp_path, family):
    folder = tiny_models.save(built(family), tmp_path / "model", dtype=torch.bfloat16)
    checkpoint = pack(folder, tmp_path / "packed", scheme="W4A16")[1]
    settings = {"activations": 16, "kv_dtype": "float32", "kv_tokens": 64}
    ours, modules = (load(checkpoint, runner=name, **settings).runner for name in ("auto", "modules"))
    assert isinstance(ours, Compiled)
    want = logits_of_runner(modules, tokens(24))
    modules.forget(0), ours.forget(0)
    torch.testing.assert_close(
        logits_of_runner(ours, tokens(24)), want, rtol=0, atol=4e-3 * float(want.abs().max())
    )


def test_an_adapter_changes_the_layers_of_its_own_sequence():
    """Logits are those of the merged weight, beside a sequence without it; the states of both move."""
    model, ids = built(), tokens()
    A, B = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    adapter = LoraAdapter("name", {"model.layers.0.conv.in_proj": LoraUpdate(A, B.T.repeat(3, 1))}, "digest")
    folder = model.state_dict()
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
    merged = built()
    with torch.no_grad():
        weight = merged.model.layers[0].conv.in_proj.weight
        weight.copy_((weight + B.T.repeat(3, 1) @ A).bfloat16().float())
    for index, each in enumerate((model, merged)):
        ours = torch.cat([chunks[index] for chunks in rows])
        torch.testing.assert_close(ours, logits_of(each, ids), rtol=0, atol=1e-3)


def test_windows_are_parts_of_what_was_run():
    """By numbers: a prompt in chunks shorter than the width, snapshots, drafts that stay and that go."""
    store, shape, values = StateStore(), (3, 1, 1), torch.arange(1.0, 60.0)
    for start, stop, drafts, snapshots in (
        (0, 2, 0, ()),
        (2, 3, 0, ()),
        (3, 16, 0, (8, 16)),
        (16, 20, 3, ()),
        (18, 21, 2, ()),
        (21, 22, 0, ()),
    ):
        span = TokenSpan(0, start, stop, (0, 1), 1, drafts=drafts, snapshots=snapshots)
        part = WalkedSpan(span, store.before(span), 0, shape)
        before = [float(values[at]) if at >= 0 else 0.0 for at in range(start - 3, start)]
        assert part.history[-3:].flatten().tolist() == before
        inputs = values[part.keep][:, None, None]
        after = part.after(inputs)
        at = after.position
        assert at == max(stop - drafts, part.before.position)
        assert after.layers[WINDOW].flatten().tolist() == [
            float(values[k]) if k >= 0 else 0.0 for k in range(at - 3, at)
        ]
        assert after.inputs.get(WINDOW, torch.empty(0)).flatten().tolist() == values[at:stop].tolist()
        for end, state in part.snapshots(inputs).items():
            assert state.layers[WINDOW].flatten().tolist() == values[end - 3 : end].tolist()
        assert set(part.snapshots(inputs)) == set(snapshots)
        store.update({0: after}, {})


def test_what_is_out_of_bounds_or_refused(tmp_path):
    model, ids = built(), tokens()
    actual = runner(model)
    run(actual, (0, ids, 0, 9, (0,)))
    before = actual.states.before(TokenSpan(0, 9, 12, (0,), 1))
    with pytest.raises(IndexError, match="token ids"):
        actual.run(StepInput([5, 1 << 20], (TokenSpan(0, 9, 11, (0,), 1),)))
    assert actual.states.before(TokenSpan(0, 9, 12, (0,), 1)) is before
    given = {
        "ids": [5],
        "positions": [0],
        "slots": [0],
        "counts": [1],
        "past": [0],
        "blocks": [[0]],
        "rows": [0],
    }
    with pytest.raises(IndexError, match="rows"):
        actual._program.run(StepTokens(**given, keep=[1], inputs=torch.empty(1, 2, 64)))
    with pytest.raises(ModelError, match=r"no place for model\.layers\.0\.mlp\.scale"):
        compiled(model.config, model.state_dict() | {"model.layers.0.feed_forward.scale": ids}, blocks=4)
    folder = tiny_models.save(built(), tmp_path / "model", dtype=torch.bfloat16)
    with pytest.raises(ModelError, match="short convolutions"):
        load(folder, runner="device", kv_tokens=64)
    assert (
        llama_name("model.layers.0.self_attn.q_proj.weight", NAMES)
        == "model.layers.0.self_attn.q_proj.weight"
    )
