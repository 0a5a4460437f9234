"""What each position counts: the mean of squared gradients, in runs of positions that share a weight."""

import pytest
import torch

from attar.sensitivity import gradients as module
from attar.sensitivity.positions import position_weights, shares
from tests import tiny_models

ROWS = torch.randint(5, 250, (3, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", ["llama3", "gpt2"])
def test_weights_are_the_mean_squared_gradients_of_sampled_labels(family, monkeypatch):
    """Against autograd on outputs that are leaves, with the labels that were drawn."""
    drawn, real = [], module._sampled_labels
    monkeypatch.setattr(module, "_sampled_labels", lambda *args: drawn.append(real(*args)) or drawn[-1])
    model = tiny_models.build(family, num_hidden_layers=2)
    names = [name for name, _ in model.named_modules() if name.endswith(("v_proj", "up_proj", "c_attn"))]
    weights = position_weights(model, ROWS, names, seed=3)
    assert sorted(weights) == sorted(names) and names
    for name in names:
        energy = torch.zeros(24, dtype=torch.float64)
        for row, labels in zip(ROWS, drawn, strict=True):
            outputs = []

            def replace(_, __, output, outputs=outputs):
                outputs.append(output.detach().requires_grad_())
                return outputs[-1]

            handle = model.get_submodule(name).register_forward_hook(replace)
            log_p = model(input_ids=row[None]).logits[0].float().log_softmax(-1)
            handle.remove()
            (gradient,) = torch.autograd.grad(-log_p.gather(-1, labels[:, None]).sum(), outputs)
            energy += gradient[0].double().square().mean(-1)
        wanted = torch.cat([part.mean().expand(len(part)) for part in energy.split(shares(24))])
        torch.testing.assert_close(weights[name], (wanted / wanted.mean()).float(), rtol=1e-3, atol=1e-5)


def test_the_first_token_of_values_counts_more_than_the_last():
    """Every later token reads it; the last one's value is read once."""
    model = tiny_models.build("llama3", num_hidden_layers=2)
    weight = position_weights(model, ROWS, ["model.layers.0.self_attn.v_proj"])
    values = weight["model.layers.0.self_attn.v_proj"]
    assert float(values[0]) > 2 * float(values[-1]) and float(values.mean()) == pytest.approx(1.0, rel=1e-5)


def test_experts_have_no_positions():
    model = tiny_models.build("mixtral", num_hidden_layers=1)
    from attar.models.loading.experts import unstack

    model = unstack(model)
    names = [
        name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in name
    ]
    weights = position_weights(model, ROWS, names)
    assert any(".experts." in name for name in names)
    assert "model.layers.0.self_attn.v_proj" in weights
    assert not any(".experts." in name for name in weights)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 12, 16, 100, 512, 2048])
def test_runs_of_positions_fill_the_row(length):
    sizes = shares(length)
    assert sum(sizes) == length and min(sizes) > 0 and sizes[:4] == [1] * min(4, length)
    assert len(sizes) <= 4 + 2 * max(length, 4).bit_length()
