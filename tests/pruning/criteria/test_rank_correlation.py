"""Scores against brute force on a real model: each unit masked, the KL measured."""

import pytest
import torch

from attar.data.packing import calibration_batches
from attar.models.loading.load import load_model, load_tokenizer
from attar.models.surgery.cut_plan import CutPlan
from attar.models.surgery.masking import masked_units
from attar.sensitivity.reference import reference_of
from tests.pruning.scored import scored, scoring

LAYER, EVERY = 4, 32


def spearman(x, y):
    ranks = [torch.argsort(torch.argsort(values)).double() for values in (x, y)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


@pytest.mark.slow
def test_the_default_criterion_ranks_neurons_as_removing_each_of_them_does(tmp_path):
    model = load_model("attar:tiny", dtype=torch.float32)
    batches = calibration_batches(
        load_tokenizer("attar:tiny"),
        "python-stdlib",
        samples=4,
        sequence_length=128,
        batch_size=4,
        seed=0,
        bos="auto",
    )
    anatomy = scoring(model, "neurons", batches, tmp_path).anatomy
    widths = [range(block.mlp.neurons) for block in anatomy.blocks]
    neurons = range(0, len(widths[LAYER]), EVERY)
    lost = []
    names = [block.name for block in anatomy.blocks]
    with reference_of(model, names, batches, "fp32", 2**30, tmp_path / "reference") as reference:
        reference.move(LAYER)
        for neuron in neurons:
            keep = [tuple(width) for width in widths]
            keep[LAYER] = tuple(index for index in keep[LAYER] if index != neuron)
            with masked_units(model, CutPlan(neurons=tuple(keep))):
                lost.append(reference.kl())
    bounds = {"wanda": 0.85, "gradient": 0.7, "taylor": 0.7, "activation": 0.7}
    for criterion, bound in bounds.items():
        scores = scored(model, "neurons", criterion, batches, tmp_path / criterion)[LAYER, list(neurons)]
        assert spearman(scores, torch.tensor(lost)) > bound, criterion
