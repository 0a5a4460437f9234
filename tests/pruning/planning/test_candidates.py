"""Candidates: which plans are compared, how, and going on after a kill."""

import json

import pytest
import torch

from attar.errors import DataError, ModelError
from attar.models.loading.load import load_model
from attar.pruning.planning import candidates
from attar.pruning.planning.candidates import held_out_kl, pick_candidates
from attar.pruning.settings import prune_settings
from attar.pruning.stage import prune
from tests import tiny_models
from tests.pruning.planning.test_scan import SMALL

SHORT = {**SMALL, "ratio": 0.4, "candidates": 2, "candidate_steps": 6}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_models.save(
        tiny_models.build("llama3", num_hidden_layers=2), tmp_path_factory.mktemp("models") / "llama3"
    )


@pytest.mark.parametrize(("count", "chosen"), [(1, "a"), (2, "ad"), (3, "adc"), (4, "adcb"), (9, "adcbe")])
def test_depth_and_width_alone_are_among_the_candidates(count, chosen):
    """The best, then the best of depth alone and of width alone, then the others."""
    cuts = {"a": ("heads", "layers"), "b": ("neurons", "layers"), "c": ("neurons",), "d": ("layers",)}
    cuts["e"] = ("hidden",)
    assert pick_candidates(list(cuts), list(cuts.values()), count) == list(chosen)


def test_a_best_plan_of_depth_alone_is_not_listed_twice():
    assert pick_candidates(["a", "b"], [("layers",), ("heads",)], 3) == ["a", "b"]


@pytest.mark.slow
def test_the_best_after_training_is_cut_without_it(llama, tmp_path, monkeypatch):
    """The table has both figures; the weights are the original's."""
    afters = iter([0.9, 0.2])
    original = candidates.held_out_kl
    calls = []

    def judged(teacher, student, rows, **more):
        calls.append(original(teacher, student, rows, **more))
        return calls[-1] if len(calls) % 2 else next(afters)  # before, after

    monkeypatch.setattr(candidates, "held_out_kl", judged)
    pruned = prune(llama, tmp_path / "out", prune_settings(**{**SHORT, "candidate_steps": 1}))
    details = pruned.card.details
    first, second = details["candidates"]
    assert (first["kl_after"], second["kl_after"]) == (0.9, 0.2)
    assert (first["chosen"], second["chosen"]) == (False, True)
    assert details["plan"]["plan"] == second["plan"] != first["plan"]
    assert first["kl"] <= second["kl"]  # one-shot quality would have chosen the first
    rows = {row.tobytes() for row in load_model(llama).get_input_embeddings().weight.detach().numpy()}
    kept = load_model(pruned).get_input_embeddings().weight.detach().numpy()
    if kept.shape[1] == 64:
        assert {row.tobytes() for row in kept} == rows


@pytest.mark.slow
def test_training_lowers_the_divergence_and_a_killed_run_goes_on(llama, tmp_path, monkeypatch):
    pruned = prune(llama, tmp_path / "whole", prune_settings(**SHORT))
    table = pruned.card.details["candidates"]
    assert all(row["kl_after"] < row["kl_before"] for row in table)
    original, trained = candidates.train, []

    def train(model, *arguments, **options):
        trained.append(options["what"])
        if len(trained) == 2:
            raise KeyboardInterrupt  # after the first candidate
        return original(model, *arguments, **options)

    monkeypatch.setattr(candidates, "train", train)
    with pytest.raises(KeyboardInterrupt):
        prune(llama, tmp_path / "parts", prune_settings(**SHORT))
    resumed = prune(llama, tmp_path / "parts", prune_settings(**SHORT))
    assert trained == ["candidate 1 of 2", "candidate 2 of 2", "candidate 2 of 2"]
    assert resumed.card.details["candidates"] == table
    weights = [folder.path / "model.safetensors" for folder in (pruned, resumed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_divergence_is_a_mean_over_tokens():
    model, other = tiny_models.build("llama3"), tiny_models.build("llama3", seed=1)
    rows = tiny_models.tokens(model, batch=5, length=8)
    p, q = (one(input_ids=rows).logits.double().log_softmax(-1) for one in (model, other))
    expected = float((p.exp() * (p - q)).sum(-1).mean().detach())
    with torch.no_grad():
        assert held_out_kl(model, other, rows, batch=2) == pytest.approx(expected, rel=1e-5)
        assert held_out_kl(model, model, rows) == 0.0


def test_an_encoder_has_no_candidates(tmp_path):
    folder = tiny_models.save(tiny_models.build("bert"), tmp_path / "bert")
    with pytest.raises(ModelError, match="an encoder is not distilled"):
        prune(folder, tmp_path / "out", prune_settings(**SHORT))
    assert not (tmp_path / "out").exists()


def test_text_that_ends_with_the_samples_is_refused(llama, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"A line of text, number {n}. " * 12}) for n in range(40)))
    settings = {**SHORT, "data": str(text), "samples": 1000}
    with pytest.raises(DataError, match="no rows after the first 1000"):
        prune(llama, tmp_path / "out", prune_settings(**settings))
