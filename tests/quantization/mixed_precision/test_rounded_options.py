"""Options as GPTQ rounds them: against the rounding of a layer alone, and what is kept of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attar.checkpoint import atomic, open_checkpoint
from attar.errors import CheckpointError, OutputError
from attar.models.loading.load import load_model
from attar.planner.costs import layer_groups
from attar.planner.settings import PlanSettings
from attar.progress import SILENT, Silent
from attar.quantization.grids import QuantizedTensor
from attar.quantization.hessian import Hessian
from attar.quantization.layerwise import LayerSolver
from attar.quantization.mixed_precision import rounded_options, search
from attar.quantization.mixed_precision.rounded_options import RoundedOptions, rounding_of
from attar.quantization.mixed_precision.search import integer_candidates
from attar.quantization.mixed_precision.sensitivity import nearest_mse
from attar.quantization.rounding import METHODS
from attar.quantization.settings import SparseGPTQSettings, quantize_settings
from attar.sensitivity.weight_changes import group_name
from tests import tiny_models

GRIDS = {name: integer_candidates(32)[name](torch.float32) for name in ("W2A16", "W3A16", "W8A16")}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(rounded_options, "OPTION_TOKENS", 256)
    return open_checkpoint(tiny_models.save(tiny_models.build("llama3"), tmp_path / "m"))


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return PlanSettings(size="1MB", data=str(tmp_path / "text.txt"), sequence_length=16, batch_size=4)


def rounding(checkpoint: Any, settings: Any, method: str = "gptq") -> Any:
    groups = {**layer_groups(checkpoint), "lm_head": ["lm_head"]}
    candidates = {name: lambda storage, grid=grid: grid for name, grid in GRIDS.items()}
    return rounding_of(checkpoint, groups, candidates, method, settings)


def test_codes_are_those_of_gptq_with_the_originals_inputs(checkpoint: Any, settings: Any) -> None:
    """A Linear of the second block, whose inputs would be others behind rounded layers."""
    model, name = load_model(checkpoint), "model.layers.1.mlp.down_proj"
    linear, statistics = model.get_submodule(name), Hessian(model.config.intermediate_size)
    weight: Tensor = linear.weight.detach()
    text = rounded_options.calibration_text(checkpoint, settings, 16, rounded_options.SPLIT)
    first = torch.tensor([8.0] * 16)  # what the first tokens count

    def see(module: Any, inputs: Any) -> None:
        statistics.add(inputs[0], importance=first.expand(len(inputs[0]), -1))

    with torch.no_grad():
        handle = linear.register_forward_pre_hook(see)
        for batch in text:
            model(batch)
        handle.remove()
    with rounding(checkpoint, settings) as rounded:
        for grid in (GRIDS["W2A16"], GRIDS["W3A16"]):
            alone = LayerSolver({name: grid}, METHODS["gptq"], SparseGPTQSettings())
            solution = alone.solve({name: weight}, statistics)[name]
            expected = QuantizedTensor.from_tensors(grid, solution.tensors)
            actual = rounded(name, weight, grid)
            assert (actual.codes == expected.codes).float().mean() > 0.9
            nearest = nearest_mse(name, weight, grid)
            assert (actual.codes != nearest.codes).float().mean() > 0.05
        wide = GRIDS["W8A16"]
        assert torch.equal(rounded(name, weight, wide).codes, nearest_mse(name, weight, wide).codes)
        head, grid = model.lm_head.weight.detach(), GRIDS["W3A16"]  # in no block
        assert torch.equal(rounded("lm_head", head, grid).codes, nearest_mse("", head, grid).codes)


def test_a_killed_sweep_goes_on_and_a_finished_one_is_read(
    checkpoint: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve, calls = LayerSolver.solve, list[int]()

    def dying(self: Any, weights: Any, statistics: Any) -> Any:
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return solve(self, weights, statistics)

    weight = load_model(checkpoint).model.layers[1].self_attn.q_proj.weight.detach()
    name, grid = "model.layers.1.self_attn.q_proj", GRIDS["W3A16"]
    monkeypatch.setattr(LayerSolver, "solve", dying)
    with pytest.raises(KeyboardInterrupt), rounding(checkpoint, settings):
        pass
    with rounding(checkpoint, settings) as again:
        codes = again(name, weight, grid).codes
    assert len(calls) == 12 + 16  # two grids of four groups of three blocks, of which the first was done
    calls.clear()
    with rounding(checkpoint, settings) as read:
        assert torch.equal(read(name, weight, grid).codes, codes) and not calls
    monkeypatch.setenv("ATTAR_CACHE", str(checkpoint.path.parent / "whole"))
    monkeypatch.setattr(LayerSolver, "solve", solve)
    with rounding(checkpoint, settings) as whole:
        assert torch.equal(whole(name, weight, grid).codes, codes)


@contextmanager
def holding(folder: Path, seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has the lock of a folder; without attar, which takes seconds to import."""
    lock = folder.with_name(f".{folder.name}.lock")
    code = (
        f"import fcntl, time; lock = open({str(lock)!r}, 'r+b'); fcntl.lockf(lock, fcntl.LOCK_EX)\n"
        f"print('held', flush=True); time.sleep({seconds})"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process


def test_another_process_is_waited_for(checkpoint: Any, settings: Any) -> None:
    with rounding(checkpoint, settings) as rounded:
        folder = rounded.swept.files[0].parent
    lines: list[str] = []

    class Kept(Silent):
        def log(self, line: str) -> None:
            lines.append(line)

    with holding(folder, seconds=0.5) as process, rounded_options.locked(folder, Kept()):
        assert process.wait(10) == 0
    assert len(lines) == 1 and "waiting for another process" in lines[0]


def test_a_full_disk_is_refused_before_the_sweep(
    checkpoint: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 1000)
    monkeypatch.setattr(rounded_options, "sweep_linears", None)
    with pytest.raises(OutputError, match="rounded-"), rounding(checkpoint, settings):
        pass


def test_many_codes_are_not_kept_and_nearest_makes_none(
    checkpoint: Any, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rounding(checkpoint, settings, "rtn") as rounded:
        assert rounded is nearest_mse
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(rounded_options, "KEPT", 1000)
    with rounding(checkpoint, settings):
        (folder,) = (tmp_path / "cache").glob("*/rounded-*")
    assert not folder.exists()


def test_the_codes_used_last_are_kept(
    checkpoint: Any, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for two texts of three: the second, which the first was used after, goes."""
    folders, texts = [], [settings.data, str(tmp_path / "second.txt"), str(tmp_path / "third.txt")]
    for path in texts[1:]:
        Path(path).write_text(f"{path} has words of its own, which nobody else has. " * 400)
    for number in (0, 1, 0):
        with rounding(checkpoint, replace(settings, data=texts[number])) as rounded:
            folders.append(rounded.swept.files[0].parent)
    assert len(set(folders)) == 2
    bytes_of_one = sum(file.stat().st_size for file in folders[0].glob("block-*"))
    monkeypatch.setattr(rounded_options, "KEPT", 2 * bytes_of_one + 1000)
    with rounding(checkpoint, replace(settings, data=texts[2])) as rounded:
        folders.append(rounded.swept.files[0].parent)
    assert set((tmp_path / "cache").glob("*/rounded-*")) == {folders[0], folders[-1]}
    monkeypatch.setattr(rounded_options, "KEPT", 0)
    with holding(folders[0], seconds=60) as process:
        with rounding(checkpoint, replace(settings, data=texts[2])):
            pass
        process.kill()
    assert set((tmp_path / "cache").glob("*/rounded-*")) == {folders[0]}, "another process works with it"
    assert rounded_options._used(tmp_path / "forgotten by another process") == 0.0


def test_a_damaged_file_is_refused(checkpoint: Any, settings: Any, tmp_path: Path) -> None:
    with rounding(checkpoint, settings) as rounded:
        assert isinstance(rounded, RoundedOptions)
        rounded.swept.files[1].write_bytes(b"not safetensors")
        with pytest.raises(CheckpointError, match=r"rounded-.*damaged"):
            rounded("model.layers.1.self_attn.q_proj", torch.zeros(1, 1), GRIDS["W3A16"])
    with pytest.raises(CheckpointError, match=r"rounded-.*damaged"), rounding(checkpoint, settings):
        pass


def test_bits_go_where_the_method_leaves_losses(
    checkpoint: Any, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group of which GPTQ leaves nothing gets the fewest bits, whichever it is."""
    asked = quantize_settings(
        method="gptq", bits=4.5, group_size=32, data=settings.data, samples=2, sequence_length=16
    )
    call = RoundedOptions.__call__
    for spared in list(layer_groups(checkpoint).values())[:2]:
        monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / group_name(spared)))

        def nothing_lost(self: Any, module: str, weight: Tensor, grid: Any, spared: Any = spared) -> Any:
            rounded = call(self, module, weight, grid)

            class Near:
                def dequantize(self) -> Tensor:
                    return weight.lerp(rounded.dequantize(), 1e-3)

            return Near() if module in spared else rounded

        monkeypatch.setattr(RoundedOptions, "__call__", nothing_lost)
        schemes, report = search.choose_bits(checkpoint, asked, tmp_path / "work", SILENT)
        assert {schemes[module] for module in spared} == {"W2A16"}
        assert 0.5 < report["measured"] / report["predicted"] < 2  # both under GPTQ
