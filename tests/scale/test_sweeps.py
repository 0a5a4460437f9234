"""Sweeps, scores, sensitivities and evaluations that processes share: those of one, up to float32's sums."""

import json

import pytest
from safetensors.torch import load_file

from attar.checkpoint.open import open_checkpoint
from tests.scale import sweeps
from tests.scale.processes import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SAME = 0.99  # of the stored numbers: a sum's rounding moves a weight over a threshold, or over the middle
EXACT = ("wanda", "layers", "fp8", "bits", "smoothquant", "autoround", "experts")
"""A maximum, the first process alone, or scores whose order no rounding changes."""
CHAIN = ("sparsegpt", "yaqa", "bits_gptq", "mixture", "exl2", "rounded")
"""One other code makes the next ones other, too: their errors are compared."""
QUALITY = ("loss", "kl_mean", "kl_p99", "top1_agreement", "accuracy", "quality_kept", "tokens", "tasks")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweeps")
    dense, mixture = sweeps.models(folder)
    for count in (2, 1):
        (folder / str(count)).mkdir()
        run_ranks(sweeps.sweep_all, count, dense, mixture, str(folder / str(count)))
    return folder / "1", folder / "2"


def tensors(folder):
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def rows(folder):
    return {row["name"]: row for row in open_checkpoint(folder).card.details["layers"]}


def test_nothing_else_is_left(folders):
    assert [
        [p.name for p in folder.iterdir() if "rank" in p.name or ".work" in p.name] for folder in folders
    ] == [
        [],
        [],
    ]
    assert [p.name for p in folders[1].glob("cache/**/*rank*")] == []


@pytest.mark.parametrize("case", CHAIN)
def test_two_processes_err_as_one(folders, case):
    one, two = (rows(folder / case) for folder in folders)
    assert one.keys() == two.keys()
    assert [row.get("routed") for row in one.values()] == [row.get("routed") for row in two.values()]
    errors = [sum(row["error"] for row in each.values()) for each in (one, two)]
    assert errors[0] == pytest.approx(errors[1], rel=0.05)
    first = [name for name in one if "layers.0.self_attn" in name and name.endswith(("q_proj", "v_proj"))]
    for name in first:  # the same inputs: but for sums of all rows in another order, nothing differs
        assert one[name]["error"] == pytest.approx(two[name]["error"], rel=2e-3), name
    assert len(first) == 2


@pytest.mark.parametrize(
    "case", [case for case in (*sweeps.PRUNE, *sweeps.QUANTIZE, *sweeps.MIXTURE) if case not in CHAIN]
)
def test_two_processes_solve_as_one(folders, case):
    one, two = (tensors(folder / case) for folder in folders)
    assert one.keys() == two.keys() and len(one) > 10
    for name, tensor in one.items():
        assert tensor.shape == two[name].shape
        if case in EXACT:
            assert float((tensor == two[name]).float().mean()) == 1.0, name
        else:
            assert ((tensor == 0) == (two[name] == 0)).float().mean() >= SAME, name
            lost = (tensor.float() - two[name].float()).norm() / tensor.float().norm().clamp(min=1e-9)
            assert float(lost) < 0.02, name


@pytest.mark.parametrize("case", ["wanda", "sparsegpt", "owl"])
def test_all_tokens_count(folders, case):
    one, two = (rows(folder / case) for folder in folders)
    assert one.keys() == two.keys()
    for name, row in one.items():
        assert row.get("tokens") == two[name].get("tokens")
        assert row["sparsity"] == pytest.approx(two[name]["sparsity"], abs=1e-3)


def test_the_importance_of_inputs_is_that_of_all_tokens(folders):
    files = [
        next(path for path in (folder / "importance").glob("*.gguf") if path.name != "imatrix.gguf")
        for folder in folders
    ]
    one, two = (file.read_bytes() for file in files)
    assert len(one) == len(two)
    assert sum(a == b for a, b in zip(one, two, strict=True)) / len(one) >= SAME


def test_two_processes_measure_as_one(folders):
    one, two = (json.loads((folder / "measured.json").read_text()) for folder in folders)
    for name in QUALITY:
        if isinstance(one[name], float):
            assert one[name] == pytest.approx(two[name], rel=1e-6), name
        else:
            assert one[name] == two[name], name
    assert one["tasks"] == two["tasks"] and one["tasks"][0]["questions"] == len(sweeps.QUESTIONS)
