"""Tuning: the loss is its definition, the codes stay, and what is stored is what was tuned."""

import copy

import pytest
import torch

from attar.models.anatomy.discover import discover
from attar.models.head import Head, head_of
from attar.quantization.grids import GGML, IntGrid, QuantizedTensor
from attar.quantization.grids.float8 import Float8Grid, MXFP8Grid
from attar.quantization.grids.fp4 import MXFP4Grid, NVFP4Grid
from attar.quantization.grids.nf4 import NF4Grid
from attar.quantization.methods import tune as module
from attar.quantization.methods.qat import WeightQuantizer
from attar.quantization.methods.rtn import rtn
from attar.quantization.methods.tune import TunedBlocks, head_kl, original_states, tunable_norms, tune
from attar.walks.settings import TrainSettings
from tests import tiny_models

SETTINGS = TrainSettings(
    steps=12,
    batch_size=4,
    sequence_length=12,
    learning_rate=1e-2,
    weight_decay=0.0,
    min_lr_ratio=0.0,
    precision="fp32",
)
ROWS = torch.randint(5, 300, (16, 12), generator=torch.Generator().manual_seed(0))


def rounded(family="qwen2", grid=None):
    """A model, the codes of its Linears and its rows with states."""
    model = tiny_models.build(family, num_hidden_layers=2)
    names = [name for block in discover(model).blocks for name in block.linears]
    grid = grid or IntGrid(3, 16, storage=torch.bfloat16)
    codes = {name: rtn(weight_of(model, name), grid) for name in names}
    return model, codes, original_states(model, ROWS, 4)


def weight_of(model, name):
    weight = model.get_submodule(name).weight.detach()
    return weight if isinstance(model.get_submodule(name), torch.nn.Linear) else weight.T.contiguous()


def tuned(model, codes, examples, **changes):
    settings = SETTINGS if not changes else SETTINGS.__class__(**{**vars(SETTINGS), **changes})
    return tune(model, codes, examples[:12], examples[12:], settings, norms=tunable_norms(model))


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (0.5, 3.0)])
def test_the_loss_and_its_gradient_are_those_of_the_definition(scale, softcap, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 3 * 40)  # chunks of three tokens
    generator = torch.Generator().manual_seed(1)
    head = Head(torch.randn(40, 8, generator=generator).double(), None, scale, softcap)
    h, t = (torch.randn(10, 8, generator=generator).double() for _ in range(2))
    h.requires_grad_()
    value = head_kl(h, t, head)
    (gradient,) = torch.autograd.grad(value, h)

    def logits(x):
        z = scale * (x @ head.weight.T)
        return softcap * torch.tanh(z / softcap) if softcap else z

    log_p, log_q = logits(t).log_softmax(-1), logits(h).log_softmax(-1)
    wanted = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    (exact,) = torch.autograd.grad(wanted, h)
    assert value.item() == pytest.approx(float(wanted), rel=1e-5)
    assert torch.allclose(gradient, exact, rtol=1e-4, atol=1e-6)


GRIDS = {
    "int3": IntGrid(3, 16, storage=torch.bfloat16),
    "int4 asymmetric": IntGrid(4, 16, symmetric=False, storage=torch.bfloat16),
    "int8 rows": IntGrid(8, 0, storage=torch.bfloat16),
    "fp8": Float8Grid("e4m3fn", storage=torch.bfloat16),
    "nvfp4": NVFP4Grid(),
    "nf4": NF4Grid(16, storage=torch.bfloat16),
    "q4_0": GGML["Q4_0"],
    "q5_1": GGML["Q5_1"],
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", GRIDS)
def test_codes_stay_and_what_is_stored_is_what_was_tuned(name):
    model, codes, examples = rounded(grid=GRIDS[name])
    before = {key: copy.deepcopy(stored.codes) for key, stored in codes.items()}
    result = tuned(model, codes, examples)
    norms = tunable_norms(model)
    assert sorted(result.norms) == sorted(norms)
    for key, stored in result.weights.items():
        assert isinstance(stored, QuantizedTensor) and torch.equal(stored.codes, before[key]), key
        held = weight_of(model, key)
        assert torch.allclose(stored.dequantize(), held, atol=1e-6), key
        if stored.parameters.minimum is None:  # with one, zero is d_m apart from a level
            assert torch.equal(held == 0, codes[key].dequantize() == 0), key
    assert any(
        not torch.equal(codes[key].parameters.scale, result.weights[key].parameters.scale) for key in codes
    )


@pytest.mark.parametrize("name", [*[name for name in GRIDS if name[0] != "q"], "mxfp4", "mxfp8"])
def test_the_first_step_computes_what_was_rounded(name):
    """Small weights too, whose global scale is far from 1; powers of two stay in both directions."""
    grid = {**GRIDS, "mxfp4": MXFP4Grid(), "mxfp8": MXFP8Grid()}[name]
    weight = 0.02 * torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    quantized = rtn(weight, grid)
    quantizer = WeightQuantizer(weight, quantized.grid, quantized, fixed=True, transposed=False)
    assert torch.equal(quantizer(weight), quantized.dequantize())
    assert torch.equal(quantizer.quantized(weight).dequantize(), quantized.dequantize())
    if name.startswith("mx"):
        for factor in (0.9, 1.1):
            torch.nn.init.constant_(quantizer.factor, factor)
            assert torch.equal(quantizer(weight), quantized.dequantize())


@pytest.mark.parametrize("kind", GGML)
def test_the_numbers_of_a_block_learn_and_its_codes_stay(kind):
    weight = torch.randn(3, 512, generator=torch.Generator().manual_seed(2))
    quantized = GGML[kind].search(weight)
    blocks = TunedBlocks(quantized, weight.device, transposed=False)
    assert torch.equal(blocks(weight), quantized.dequantize())
    upstream = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    blocks(weight).backward(upstream)
    for name, factor in blocks.factors.items():
        alone = {key: value.double() for key, value in quantized.parameters.stored.items()}
        if name != "d":
            alone["d"] = torch.zeros_like(alone["d"])  # the part that this number decodes
        for other in ("m", "dmin"):
            if other in alone and other != name:
                alone[other] = torch.zeros_like(alone[other])
        part = QuantizedTensor(GGML[kind], quantized.codes, GGML[kind].parameters(alone)).dequantize()
        wanted = (part * upstream).double().reshape(*factor.shape, -1).sum(-1)
        assert torch.allclose(factor.grad.double(), wanted, rtol=1e-4, atol=1e-5), name
        with torch.no_grad():
            factor.mul_(torch.linspace(0.9, 1.1, factor.numel()).view_as(factor))
    result = blocks.quantized(weight)
    assert torch.equal(result.codes, quantized.codes) and torch.equal(result.dequantize(), blocks(weight))
    for name, stored in result.parameters.stored.items():
        assert stored.dtype == quantized.parameters.stored[name].dtype
        assert torch.equal(stored, quantized.parameters.stored[name]) == (name not in blocks.factors), name


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "share"), [("qwen2", 0.9), ("gpt2", 0.9), ("gemma2", 0.98)])
def test_a_coarse_model_comes_nearer_to_the_original(family, share):
    model, codes, examples = rounded(family, IntGrid(2, 16, storage=torch.bfloat16))
    result = tuned(model, codes, examples, steps=40)
    assert result.after < share * result.before
    states = original_states(model, ROWS[12:], 4).states
    kl = head_kl(states.float(), examples[12:].states.float(), head_of(model))
    assert float(kl) == pytest.approx(result.after, rel=0.05)


def test_scales_are_learned_from_the_original_and_not_from_the_text():
    """A model that is its own original stays: no gradient, whatever the text says."""
    model, _, examples = rounded()
    result = tuned(model, {}, examples)
    assert result.before == pytest.approx(0.0, abs=1e-3) and result.after == pytest.approx(0.0, abs=1e-3)
