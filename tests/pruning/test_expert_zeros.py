"""Zeros in the experts of a mixture; what cuts dense MLPs refuses them by name."""

import pytest

import attar
from attar.errors import ModelError
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


def test_neurons_of_a_mixture_are_refused_by_name(tmp_path):
    source = tiny_models.save(tiny_models.build("mixtral"), tmp_path / "model")
    with pytest.raises(ModelError, match="has a mixture of experts instead of a dense MLP"):
        attar.prune(source, tmp_path / "out", method="neurons", **SMALL)
    assert not (tmp_path / "out").exists()
