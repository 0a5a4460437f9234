"""The model's curvature: one loading of the model, however many portions memory asks for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attar.checkpoint import open_checkpoint
from attar.quantization.calibration import batches_of
from attar.quantization.methods import output_hessian as curvature
from attar.quantization.plan import plan
from attar.quantization.settings import quantize_settings
from attar.quantization.stage import quantize
from tests import tiny_models
from tests.log_lines import LogLines

TEXT = str(Path(json.__file__).parent)
SETTINGS = quantize_settings(
    method="yaqa", group_size=32, samples=4, sequence_length=32, batch_size=2, check_tokens=0, data=TEXT
)


@pytest.fixture
def loads(monkeypatch):
    """How often the model is loaded."""
    seen = []

    def load_model(*args, **kwargs):
        seen.append(args)
        return real(*args, **kwargs)

    real = curvature.load_model
    monkeypatch.setattr(curvature, "load_model", load_model)
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = tiny_models.build("llama3", num_hidden_layers=2)
    return tiny_models.save(model, tmp_path_factory.mktemp("curvature") / "llama3", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    return quantize(folder, tmp_path_factory.mktemp("whole") / "out", SETTINGS).path / "model.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize(("free", "portions"), [(1, 14), (150_000, 5), (2**40, 1)])
def test_portions_follow_the_memory_and_change_no_code(
    folder, whole, tmp_path, monkeypatch, loads, free, portions
):
    monkeypatch.setattr(curvature, "LEAST", 0)
    monkeypatch.setattr(curvature, "free_memory", lambda device: free)
    progress = LogLines()
    quantized = quantize(folder, tmp_path / "parts", SETTINGS, progress=progress)
    wanted = load_file(whole)
    assert all(torch.equal(quantized.load(name), wanted[name]) for name in wanted)
    assert len(loads) == 1
    assert [line for line in progress.lines if line.startswith("yaqa: ")] == [
        f"yaqa: {4 * portions} backward passes over the whole model: 14 layers in {portions} "
        f"portion{'s' if portions > 1 else ''}, 4 sequences each"
    ]


def test_a_killed_run_goes_on_with_what_is_missing(folder, tmp_path, monkeypatch, loads):
    checkpoint = open_checkpoint(folder)
    chosen, batches = plan(checkpoint, SETTINGS.storage), batches_of(checkpoint, SETTINGS)

    def saved_model():
        options = {"seed": SETTINGS.seed, "device": torch.device("cpu")}
        return curvature.OutputHessian(checkpoint, chosen, batches, tmp_path / "work", LogLines(), **options)

    saved_model().collect()
    name = "model.layers.1.mlp.down_proj"
    file = tmp_path / "work" / "curvature" / f"{name}.safetensors"
    wanted = file.read_bytes()
    times = {path.name: path.stat().st_mtime_ns for path in file.parent.iterdir() if path != file}
    file.unlink()
    saved_model().collect()
    assert file.read_bytes() == wanted
    assert times == {path.name: path.stat().st_mtime_ns for path in file.parent.iterdir() if path != file}
    loads.clear()
    saved_model().collect()
    assert not loads and saved_model()(name).shape == (64, 64)
