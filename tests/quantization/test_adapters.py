"""Adapters beside a quantized base: what is frozen, what is learned, merged and kept."""

import copy
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from attar.errors import MissingExtraError, ModelError, SettingsError
from attar.models.anatomy import discover
from attar.quantization.adapters import learn_adapters, save_adapters
from attar.quantization.grids import IntGrid
from attar.quantization.grids.nf4 import NF4Grid
from attar.quantization.methods.rtn import rtn
from attar.walks.objectives import distillation_loss, soft_loss
from attar.walks.settings import TrainSettings
from tests import tiny_models

SETTINGS = TrainSettings(
    steps=8,
    batch_size=2,
    sequence_length=12,
    learning_rate=3e-3,
    weight_decay=0.0,
    checkpoint_every=4,
    precision="fp32",
)
ROWS = torch.randint(5, 300, (8, 12), generator=torch.Generator().manual_seed(0))


def ready(family="qwen2", grid=None):
    model = tiny_models.build(family)
    names = [name for block in discover(model).blocks for name in block.linears]
    return model, dict.fromkeys(names, grid or NF4Grid(16))


def weight(model, name):
    module = model.get_submodule(name)
    return module.weight if isinstance(module, nn.Linear) else module.weight.T


def loss_of(model, loss):
    with torch.no_grad():
        return float(loss(model, ROWS))


def test_without_peft_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    model, grids = ready()
    with pytest.raises(MissingExtraError) as raised:
        learn_adapters(model, grids, ROWS, SETTINGS)
    assert ".[adapters]" in raised.value.hint


def test_refuses_wrong_settings():
    model, grids = ready()
    with pytest.raises(SettingsError, match="rank"):
        learn_adapters(model, grids, ROWS, SETTINGS, rank=0)
    with pytest.raises(SettingsError, match="init"):
        learn_adapters(model, grids, ROWS, SETTINGS, init="random")


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("init", ["zero", "error"])
def test_adapters_recover_and_merge_into_a_dense_model(family, init):
    pytest.importorskip("peft")
    grid = IntGrid(2, 16, symmetric=False)
    model, grids = ready(family, grid)
    original = copy.deepcopy(model)
    loss = distillation_loss(soft_loss(original))
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for name in grids:
            weight(rounded, name).copy_(rtn(weight(model, name), grid).dequantize())
    before = loss_of(rounded, loss)
    made = learn_adapters(model, grids, ROWS, SETTINGS, rank=4, scaling=8.0, init=init, loss=loss)
    assert type(made.model) is type(original) and loss_of(made.model.eval(), loss) < 0.9 * before
    for name in grids:
        base = made.weights[name].dequantize()
        assert torch.equal(base, rtn(weight(original, name), grid).dequantize())
        change = weight(made.model, name).detach() - base
        assert 0 < torch.linalg.matrix_rank(change, rtol=1e-3) <= 4
    for name, value in original.named_parameters():  # everything else stays
        if name.removesuffix(".weight") not in grids:
            assert torch.equal(value, made.model.get_parameter(name)), name


def test_error_start_is_the_best_fit_of_what_rounding_did():
    pytest.importorskip("peft")
    model, grids = ready(grid=IntGrid(2, 16))
    original = copy.deepcopy(model)
    settings = replace(SETTINGS, steps=1, learning_rate=1e-12)
    made = learn_adapters(model, grids, ROWS, settings, rank=4, scaling=8.0, init="error")
    for name in list(grids)[:3]:
        error = (weight(original, name) - made.weights[name].dequantize()).detach().double()
        tail = torch.linalg.svdvals(error)[4:].square().sum().sqrt()
        left = (weight(original, name) - weight(made.model, name)).detach().double().norm()
        assert float(left) == pytest.approx(float(tail), rel=1e-4)


def test_a_killed_run_resumes_and_the_adapters_are_saved_for_peft(tmp_path):
    peft = pytest.importorskip("peft")

    class Killed(BaseException):
        pass

    model, grids = ready()
    loss = distillation_loss(soft_loss(copy.deepcopy(model)))
    calls = 0

    def deadly(m, tokens):
        nonlocal calls
        calls += 1
        if calls > 6:
            raise Killed
        return loss(m, tokens)

    whole = learn_adapters(
        ready()[0], grids, ROWS, SETTINGS, rank=4, loss=loss, work=tmp_path / "whole", merge=False
    )
    with pytest.raises(Killed):
        learn_adapters(ready()[0], grids, ROWS, SETTINGS, rank=4, loss=deadly, work=tmp_path / "cut")
    torch.manual_seed(99)
    resumed = learn_adapters(
        ready()[0], grids, ROWS, SETTINGS, rank=4, loss=loss, work=tmp_path / "cut", merge=False
    )
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    save_adapters(whole, tmp_path / "adapters")
    base = ready()[0]
    with torch.no_grad():
        for name, made in whole.weights.items():
            weight(base, name).copy_(made.dequantize())
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters"))
    with torch.no_grad():
        want = whole.model.eval()(input_ids=ROWS).logits
        assert torch.allclose(loaded.eval()(input_ids=ROWS).logits, want, atol=1e-5)
    merged = replace(whole, model=whole.model.merge_and_unload())
    with pytest.raises(ModelError, match="merged"):
        save_adapters(merged, tmp_path / "no")


def test_a_name_that_is_no_linear():
    pytest.importorskip("peft")
    model, _ = ready()
    with pytest.raises(ModelError, match="nowhere"):
        learn_adapters(model, {"nowhere": NF4Grid(16)}, ROWS, SETTINGS)
