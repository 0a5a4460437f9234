"""Two checkpoints side by side, against both models run whole."""

import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.models.load import load_model, save_model
from attar.walks.compare import compare
from tests import tiny_models


def changed_copy(folder, source, change):
    model = load_model(source, dtype=torch.float32)
    with torch.no_grad():
        change(model)
    save_model(model, folder)
    return open_checkpoint(folder)


def tokens(vocabulary):
    g = torch.Generator().manual_seed(2)
    return [torch.randint(5, vocabulary, (2, 10), generator=g) for _ in range(3)]


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_agrees_with_both_models_run_whole(tmp_path, family):
    original = open_checkpoint(tiny_models.save(tiny_models.build(family), tmp_path / "original"))
    batches = tokens(240)

    def noise(model):
        g = torch.Generator().manual_seed(0)
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=g))

    changed = changed_copy(tmp_path / "changed", original, noise)
    result = compare(original, changed, batches, work=tmp_path / "work")
    p, q = (
        torch.cat([tiny_models.logits(load_model(side, dtype=torch.float32), batch) for batch in batches])
        .float()
        .log_softmax(-1)
        for side in (original, changed)
    )
    wanted = float((p.exp() * (p - q)).sum(-1).mean())
    assert result.kl == pytest.approx(wanted, rel=2e-3, abs=1e-6)
    assert result.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()), abs=0.02)
    assert result.tokens == 60 and len(result.drift) == len(list(result.drift)) > 1


def test_equal_checkpoints_do_not_differ(tmp_path):
    original = open_checkpoint(tiny_models.save(tiny_models.build("llama3"), tmp_path / "original"))
    result = compare(original, original, tokens(240), work=tmp_path / "work")
    assert result.kl == 0.0 and result.top1 == 1.0 and set(result.drift) == {0.0}


@pytest.mark.parametrize("guilty", [0, 1])
def test_the_block_that_was_destroyed_is_named(tmp_path, guilty):
    original = open_checkpoint(tiny_models.save(tiny_models.build("llama3"), tmp_path / "original"))

    def destroy(model):
        for block in model.model.layers:
            block.mlp.up_proj.weight.mul_(1.001)
        model.model.layers[guilty].mlp.down_proj.weight.mul_(-30.0)

    changed = changed_copy(tmp_path / "changed", original, destroy)
    assert compare(original, changed, tokens(240), work=tmp_path / "work").worst == guilty
