"""Zeros on the sweep, against a walk over transformers' modules that a reader can follow."""

import json
from pathlib import Path

import torch

import attar
from attar.checkpoint import open_checkpoint
from attar.data.packing import calibration_batches
from attar.models.load import load_model, load_tokenizer
from tests import tiny_models

TEXT = {"samples": 4, "sequence_length": 32, "batch_size": 2, "data": str(Path(json.__file__).parent)}


def wanda_by_hand(model, rows):
    """Algorithm 1 of the paper, 2:4: the norms of a block's inputs before any of its Linears is pruned, then all
    of them at once; the next block sees what the pruned one puts out."""
    for block in model.model.layers:
        norms, handles = {}, []
        linears = {n: m for n, m in block.named_modules() if isinstance(m, torch.nn.Linear)}
        for name, module in linears.items():

            def hook(_, args, name=name):
                norms[name] = norms.get(name, 0.0) + args[0].double().square().sum((0, 1))

            handles.append(module.register_forward_pre_hook(hook))
        with torch.no_grad():
            for batch in rows:
                model(batch)
        for handle in handles:
            handle.remove()
        for name, module in linears.items():
            scores = (module.weight.abs() * norms[name].sqrt()).detach().unflatten(1, (-1, 4))
            lowest = scores.argsort(dim=-1, stable=True)[..., :2]
            module.weight.data.unflatten(1, (-1, 4)).scatter_(-1, lowest, 0.0)


def test_wanda_scores_a_block_before_it_changes_it(tmp_path):
    folder = tiny_models.save(tiny_models.build("smollm"), tmp_path / "model")
    pruned = attar.prune(folder, tmp_path / "out", method="wanda", sparsity="2:4", precision="fp32", **TEXT)
    model = load_model(open_checkpoint(folder), dtype=torch.float32)
    given = {name: value for name, value in TEXT.items() if name != "data"}
    wanda_by_hand(model, calibration_batches(load_tokenizer(folder), TEXT["data"], seed=0, **given))
    for name, weight in model.state_dict().items():
        if name in pruned.tensors:
            assert torch.equal(pruned.load(name), weight), name
