"""The method mixed: the plan of the least KL within a budget, cut."""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from attar.cli.main import call
from attar.errors import SettingsError, UsageError
from attar.models.loading.load import load_model, save_model
from attar.models.surgery.cut_model import cut_model
from attar.models.surgery.plan_costs import STRUCTURES, PlanSizes
from attar.models.surgery.plan_space import first_units
from attar.progress import SILENT
from attar.pruning.planning.candidates import held_out_kl
from attar.pruning.planning.scan import curves
from attar.pruning.planning.study import scan_cuts
from attar.pruning.planning.trials import scanned_grid, try_plans
from attar.pruning.settings import prune_settings
from attar.pruning.stage import prune
from tests import tiny_models
from tests.pruning.planning.test_scan import SMALL, study_of


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_models.save(
        tiny_models.build("llama3", num_hidden_layers=2), tmp_path_factory.mktemp("models") / "llama3"
    )


@pytest.fixture(scope="module")
def scan_file(llama, tmp_path_factory):
    file = tmp_path_factory.mktemp("scans") / "scan.json"
    scan_cuts(study_of(llama, file), file.parent / "work", SILENT, complete=False)
    return file


def options(scan_file, **changes):
    return prune_settings(**{**SMALL, "scan": str(scan_file), **changes})


@pytest.mark.slow
def test_the_first_trial_is_the_choice_of_brute_force(llama, scan_file, tmp_path):
    """Every plan of the grid is cut and saved; of those whose file fits, the least sum of KLs is chosen."""
    study = study_of(llama, scan_file)
    scanned = scan_cuts(study, tmp_path / "work", SILENT, complete=False)
    known = curves(scanned.rows, study.space.full)
    grid = scanned_grid(study.space.grid, known)
    grid = grid._replace(heads=(2, 4), neurons=(12, 48, 96), hidden=(32, 64))
    model, full = load_model(llama), study.space.full
    sizes, kls = {}, {}
    for plan in (PlanSizes(*plan) for plan in itertools.product(*grid)):
        layers = scanned.planned.kept_layers(plan.layers)
        save_model(cut_model(model, study.space.cut_plan(plan, first_units(full), layers)), tmp_path / "cut")
        sizes[plan] = (tmp_path / "cut" / "model.safetensors").stat().st_size
        kls[plan] = sum(known[name](units) for name, units in plan._asdict().items())
    study = replace(study, space=replace(study.space, grid=grid))
    for size in (sizes[full] // 2, int(sizes[full] * 0.8)):
        expected = min((plan for plan in sizes if sizes[plan] <= size), key=kls.__getitem__)
        trials = try_plans(
            study, scanned, options(scan_file, size=f"{size}B").options, tmp_path / "t", SILENT
        )
        first = min(trials, key=lambda trial: trial.predicted)
        assert first.sizes == expected and first.bytes == sizes[expected]
        assert first.predicted == pytest.approx(kls[expected], rel=1e-9)


@pytest.mark.parametrize(
    "budget",
    [
        {"ratio": 0.4},
        pytest.param({"size": "200KB"}, marks=pytest.mark.slow),
        pytest.param({"speed": "1.8x"}, marks=pytest.mark.slow),
    ],
)
def test_the_result_is_within_the_budget_and_loads(llama, scan_file, tmp_path, budget):
    pruned = prune(llama, tmp_path / "out", options(scan_file, **budget))
    plan, details = pruned.card.details["plan"], pruned.card.details
    model, whole = AutoModelForCausalLM.from_pretrained(pruned.path), load_model(llama)
    assert model.num_parameters() == plan["parameters"]
    assert (pruned.path / "model.safetensors").stat().st_size == plan["bytes"]
    if "ratio" in budget:
        assert model.num_parameters() <= 0.6 * whole.num_parameters()
        assert plan["share"] == pytest.approx(1 - model.num_parameters() / whole.num_parameters())
    if "size" in budget:
        assert plan["bytes"] <= 200_000
    if "speed" in budget:
        read = [one.num_parameters() - one.get_input_embeddings().weight.numel() for one in (whole, model)]
        assert plan["predicted_speed"] == pytest.approx(read[0] / read[1]) and plan["predicted_speed"] >= 1.8
    assert plan["kl"] == min(row["kl"] for row in details["plans"])
    assert {row["structure"] for row in details["scan"]} == set(STRUCTURES)
    rows = torch.cat(study_of(llama, scan_file).batches)
    assert plan["kl"] == pytest.approx(held_out_kl(whole, load_model(pruned), rows), rel=1e-3)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("budget", "error", "words"),
    [
        ({"size": "1KB"}, SettingsError, r"at least \d+B \(\d.* kB\): 1 of 4 head groups, "),
        ({"ratio": 0.999}, SettingsError, r"ratio is 0.999, but must be at most 0\.\d+: 1 of 4 head groups"),
        ({"speed": "1000x"}, SettingsError, r"at most \d+(\.\d+)?x: 1 of 4 head groups"),
        ({"size": "1GB"}, UsageError, r"--size 1GB removes nothing: the model has \d+B"),
        ({"ratio": 0.0}, UsageError, r"--ratio 0.0 removes nothing: the model has [\d,]+ parameters"),
    ],
)
def test_a_budget_out_of_reach_names_the_nearest(llama, tmp_path, budget, error, words, monkeypatch):
    monkeypatch.setattr("attar.pruning.planning.study.load_model", None)  # refused before any work
    with pytest.raises(error, match=words):
        prune(llama, tmp_path / "out", prune_settings(**{**SMALL, **budget}))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [{"size": "much"}, {"speed": "0.9x"}, {"speed": "fast"}, {"ratio": 1.0}])
def test_what_is_no_budget_is_refused(wrong):
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        prune_settings(method="mixed", **wrong)


def test_it_works_in_one_process(llama, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="in one process"):
        prune(llama, tmp_path / "out", prune_settings(**SMALL, ratio=0.3))
    assert list(tmp_path.iterdir()) == []


def test_a_plan_has_one_budget():
    with pytest.raises(SettingsError, match="one budget"):
        prune_settings(method="mixed", size="1MB", speed="2x")


@pytest.mark.slow
def test_the_nearest_budget_is_met(llama, scan_file, tmp_path, capsys):
    """The size that the error names can be had."""
    small = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    arguments = ["prune", str(llama), "-o", str(tmp_path / "out"), "--scan", str(scan_file), *small]
    assert call([*arguments, "--size", "1KB"]) == 2
    least = capsys.readouterr().err.split("at least ")[1].split("B")[0]
    assert call([*arguments, "--size", f"{least}B"]) == 0
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == int(least)
    assert "the sum of its parts" in capsys.readouterr().err


@pytest.mark.slow
def test_an_encoder_is_cut_by_its_masked_tokens(tmp_path):
    folder = tiny_models.save(tiny_models.build("bert"), tmp_path / "bert")
    pruned = prune(folder, tmp_path / "out", prune_settings(**{**SMALL, "ratio": 0.3}))
    details = pruned.card.details
    assert "heads" in details["plan"]["refused"] and details["plan"]["loss"] is None
    assert {row["structure"] for row in details["scan"]} == {"neurons", "layers"}


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_mixed_loses_at_most_what_each_single_structure_does(tmp_path, ratio):
    settings = {"samples": 16, "sequence_length": 128, "data": "python-stdlib", "reconstruct": "none"}
    mixed = prune("attar:tiny", tmp_path / "mixed", prune_settings(method="mixed", ratio=ratio, **settings))
    plans = mixed.card.details["plans"]
    chosen = mixed.card.details["plan"]
    single = [
        row
        for row in plans
        if sum(row[name] < full for name, full in zip(STRUCTURES, (4, 768, 256, 8), strict=True)) == 1
    ]
    assert len(single) >= 3 and all(chosen["kl"] <= row["kl"] for row in single)
    assert all(row["share"] >= ratio for row in plans)
    if ratio == 0.5:
        assert chosen["kl"] < 0.7 * min(row["kl"] for row in single)
    errors = [abs(row["kl"] / row["predicted_kl"] - 1) for row in plans]
    assert max(errors) < 0.5, errors  # the sum of the parts is a fair prediction
