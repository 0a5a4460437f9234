"""Zeros in the experts of a mixture; what cuts dense MLPs refuses them by name."""

import pytest
import torch
import transformers

import attar
from attar.checkpoint import open_checkpoint
from attar.errors import ModelError
from attar.models.anatomy.discover import discover
from attar.models.loading.experts import unstack
from tests import tiny_models

SMALL = {"samples": 4, "sequence_length": 32, "batch_size": 4}


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["wanda", "magnitude", "sparsegpt"])
def test_half_of_every_expert_is_zero_and_the_router_is_whole(tmp_path, method):
    source = tiny_models.save(tiny_models.build("mixtral"), tmp_path / "model")
    options = {} if method == "magnitude" else SMALL
    out = attar.prune(source, tmp_path / "out", method=method, **options)
    zeros = {name: float((out.load(name) == 0).float().mean()) for name in out.tensors}
    experts = [share for name, share in zeros.items() if ".experts." in name]
    assert len(experts) == 3 * 8 * 3 and all(abs(share - 0.5) < 0.02 for share in experts)
    assert all(share == 0 for name, share in zeros.items() if name.endswith("block_sparse_moe.gate.weight"))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gpt_oss", "granitemoehybrid", "llama4"])
@pytest.mark.parametrize("method", ["wanda", "magnitude"])
def test_stacked_experts_get_zeros_and_stay_stacked(tmp_path, family, method):
    """Half of each expert's weights, of gate, up and down alike; the file has the tensors it had."""
    source = tiny_models.save(tiny_models.build(family), tmp_path / "model")
    options = {"reconstruct": "none"} if method == "magnitude" else SMALL
    out, before = attar.prune(source, tmp_path / "out", method=method, **options), open_checkpoint(source)
    assert {n: i.shape for n, i in out.tensors.items()} == {n: i.shape for n, i in before.tensors.items()}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    experts = discover(unstack(model)).blocks[1].mixture.experts
    weights = [model.get_submodule(p.name).weight for e in experts for p in (e.gate, e.up, e.down)]
    assert len(weights) == 3 * 8 and all(abs((w == 0).float().mean() - 0.5) < 0.02 for w in weights)
    for name in before.tensors:
        if "expert" not in name and "input_linear" not in name and "output_linear" not in name:
            kept = out.load(name) != 0
            assert method == "wanda" or torch.equal(out.load(name)[kept], before.load(name)[kept]), name


def test_neurons_of_a_mixture_are_refused_by_name(tmp_path):
    source = tiny_models.save(tiny_models.build("mixtral"), tmp_path / "model")
    with pytest.raises(ModelError, match="has a mixture of experts instead of a dense MLP"):
        attar.prune(source, tmp_path / "out", method="neurons", **SMALL)
    assert not (tmp_path / "out").exists()
