"""The scan: what it measures, its file, and going on after a kill."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from attar.checkpoint.open import open_checkpoint
from attar.cli.main import call
from attar.errors import CheckpointError, ModelError
from attar.models.loading.load import load_model
from attar.models.surgery.cut_model import cut_model
from attar.models.surgery.plan_costs import PlanSizes
from attar.models.surgery.plan_space import plan_space
from attar.progress import SILENT
from attar.pruning.mixed import scan
from attar.pruning.planning.scan import (
    CutMeasurement,
    ScanFile,
    ScanKey,
    curves,
    even_cuts,
    layer_cuts,
    removal_order,
)
from attar.pruning.planning.study import cut_study, scan_cuts
from attar.pruning.settings import prune_settings
from attar.pruning.task import calibration
from attar.walks.objectives import next_token_loss, token_kl
from tests import tiny_models

SMALL = {
    "method": "mixed",
    "samples": 4,
    "sequence_length": 32,
    "batch_size": 2,
    "precision": "fp32",
    "reconstruct": "none",
    "data": str(Path(json.__file__).parent),
}
KEY = ScanKey("model", "text", 64, 32, 0, 4, 2, "gradient", "fp32")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_models.save(
        tiny_models.build("llama3", num_hidden_layers=2), tmp_path_factory.mktemp("models") / "llama3"
    )


def study_of(folder, file):
    source, settings = open_checkpoint(folder), prune_settings(**SMALL)
    space = plan_space(source.config, torch.float32)
    return cut_study(
        source, space, settings, calibration(source, settings), file, file.parent / "scores", SILENT
    )


def test_every_measurement_is_that_of_the_cut_model(llama, tmp_path):
    study = study_of(llama, tmp_path / "scan.json")
    scanned = scan_cuts(study, tmp_path / "work", SILENT)
    whole, full = load_model(llama), study.space.full
    tokens = torch.cat(study.batches)
    with torch.no_grad():
        before = whole(input_ids=tokens).logits
    for row in scanned.rows:
        if row.layer is not None and row.structure != "layers":
            continue  # no config says it: that masks are right is tests/models/surgery/test_masking.py
        layers = range(full.layers)
        sizes = full
        if row.layer is not None:
            layers = [layer for layer in layers if layer != row.layer]
        elif row.structure == "layers":
            layers = scanned.planned.kept_layers(row.kept)
        else:
            sizes = full._replace(**{row.structure: row.kept})
        cut = cut_model(whole, study.space.cut_plan(sizes, study.ranking, layers))
        with torch.no_grad():
            after = cut(input_ids=tokens).logits
        kl = float(token_kl(before.flatten(0, 1), after.flatten(0, 1)).mean())
        assert row.kl == pytest.approx(kl, rel=1e-3, abs=1e-6), row
        assert row.loss == pytest.approx(float(next_token_loss(after, tokens)), rel=1e-3), row
    structures = {(row.structure, row.layer is None) for row in scanned.rows}
    assert structures == {
        *(("hidden", True), ("heads", True), ("neurons", True), ("layers", True)),
        *(("heads", False), ("neurons", False), ("layers", False)),
    }


class KilledError(Exception):
    pass


def test_an_interrupted_scan_goes_on_and_ends_with_the_same_bytes(llama, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    scan(llama, whole, prune_settings(**SMALL))
    original, runs = ScanFile.add, []

    def add(self, measurement):
        original(self, measurement)
        runs.append(measurement)
        if len(runs) % 11 == 0:
            raise KilledError

    monkeypatch.setattr(ScanFile, "add", add)
    kills = 0
    while True:
        try:
            scan(llama, parts, prune_settings(**SMALL))
            break
        except KilledError:
            kills += 1
    assert kills >= 2 and parts.read_bytes() == whole.read_bytes()
    assert len({one.identity for one in runs}) == len(runs)  # nothing was measured twice


@pytest.mark.slow
def test_a_killed_scan_goes_on_and_ends_with_the_same_bytes(tmp_path):
    command = [
        sys.executable,
        "-m",
        "attar",
        "prune",
        "attar:tiny",
        "--samples",
        "4",
        "--sequence-length",
        "64",
    ]
    killed, whole = tmp_path / "killed.json", tmp_path / "whole.json"
    process = subprocess.Popen([*command, "--scan", str(killed)], stderr=subprocess.DEVNULL)
    while not (killed.exists() and killed.read_text().count('"structure"') >= 5):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for file in (killed, whole):
        subprocess.run([*command, "--scan", str(file)], check=True, capture_output=True)
    assert killed.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.json", "whole.json"]


def test_a_scan_of_another_model_is_refused_by_name(llama, tmp_path):
    file = tmp_path / "scan.json"
    ScanFile(file, KEY).add(CutMeasurement("heads", None, 1, 4, 0.5, 2.0))
    with pytest.raises(ModelError, match=r"scan\.json: a scan with another model, tokens"):
        ScanFile(file, dataclasses.replace(KEY, model="other", tokens=1))
    assert len(ScanFile(file, KEY).known) == 1
    with pytest.raises(ModelError, match="another model"):
        scan(llama, file, prune_settings(**SMALL))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        '{"format": "attar sensitivity", "version": 2}',
        '{"format": "attar scan", "version": 1}',
        "x",
    ],
)
def test_a_file_that_is_no_scan_is_refused(tmp_path, text):
    file = tmp_path / "scan.json"
    file.write_text(text)
    with pytest.raises(CheckpointError):
        ScanFile(file, KEY)
    assert file.read_text() == text


def test_a_damaged_measurement_is_refused(tmp_path):
    file = tmp_path / "scan.json"
    ScanFile(file, KEY).add(CutMeasurement("heads", None, 1, 4, 0.5, 2.0))
    content = json.loads(file.read_text())
    for field, value in (("structure", "tails"), ("kept", 5), ("kl", "much")):
        damaged = {**content, "measurements": [{**content["measurements"][0], field: value}]}
        file.write_text(json.dumps(damaged))
        with pytest.raises(CheckpointError, match="incomplete"):
            ScanFile(file, KEY)


def test_infinite_divergences_survive_the_file_and_are_no_points_of_a_curve(tmp_path):
    file, full = tmp_path / "scan.json", PlanSizes(4, 96, 64, 3)
    for kept, kl in ((1, float("inf")), (2, 0.5)):
        ScanFile(file, KEY).add(CutMeasurement("heads", None, kept, 4, kl, None))
    known = list(ScanFile(file, KEY).known.values())
    assert sorted(one.kl for one in known) == [0.5, float("inf")]
    assert curves(known, full)["heads"].points == ((2, 0.5), (4, 0.0))


def test_a_kl_that_noise_made_negative_predicts_none():
    full = PlanSizes(4, 8, 8, 2)
    curve = curves([CutMeasurement("heads", None, 2, 4, -3e-9, None)], full)["heads"]
    assert curve(3) == curve(2) == 0.0


def test_an_unfinished_ranking_is_not_continued_with_batches_of_another_size(llama, tmp_path):
    """Its sums count batches: continued with others, rows would count twice or never."""
    source = open_checkpoint(llama)
    space = plan_space(source.config, torch.float32)
    for size in (2, 1):
        settings = prune_settings(**{**SMALL, "batch_size": size})
        batches = calibration(source, settings)
        cut_study(source, space, settings, batches, tmp_path / "scan.json", tmp_path / "work", SILENT)
    assert len(list((tmp_path / "work").iterdir())) == 2


def test_layers_go_by_the_cost_of_their_absence():
    rows = [CutMeasurement("layers", layer, 0, 1, kl) for layer, kl in enumerate((3.0, 0.2, 0.1, 0.2))]
    assert removal_order(rows, 4) == (2, 1, 3, 0)


def test_the_cuts_cover_every_layer_and_amount():
    full = PlanSizes(4, 96, 64, 3)
    config = {**tiny_models.config("llama3").to_dict(), "architectures": ["LlamaForCausalLM"]}
    grid = plan_space(config, torch.float32).measured
    even = list(even_cuts(grid, full))
    assert {cut.structure for cut in even} == {"heads", "neurons", "hidden", "layers"}
    assert all(cut.kept < cut.of and cut.layer is None for cut in even)
    alone = list(layer_cuts(full, ("heads", "layers")))
    assert [cut.layer for cut in alone] == sorted(cut.layer for cut in alone)
    assert sum(cut.structure == "layers" for cut in alone) == 3
    assert {cut.structure for cut in alone} == {"heads", "layers"}


@pytest.mark.slow
def test_the_command_measures_and_stops(llama, tmp_path, capsys):
    file = tmp_path / "scan.json"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if name != "method"]
    assert call(["prune", str(llama), "--scan", str(file), *options]) == 0
    out = capsys.readouterr().out
    assert "uniform" in out and "neurons" in out and "left out" in out
    assert call(["prune", str(llama), "--scan", str(file), "--json", *options]) == 0
    rows = json.loads(capsys.readouterr().out)["measurements"]
    assert len(rows) == len(json.loads(file.read_text())["measurements"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scan.json"]


def test_without_output_and_scan_the_command_is_refused(llama, capsys):
    assert call(["prune", str(llama)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: no output folder",
        "hint: -o OUT, or --scan FILE to measure only",
    ]


def test_scan_belongs_to_the_method_mixed(llama, capsys):
    assert call(["prune", str(llama), "--scan", "x.json", "--method", "neurons"]) == 2
    assert "belongs to mixed" in capsys.readouterr().err
