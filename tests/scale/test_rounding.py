"""A sweep that processes share: the Hessians of all batches, the codes of one process."""

import pytest
import torch
from safetensors.torch import load_file

from attar.checkpoint.open import open_checkpoint
from attar.quantization.hessian import CrossHessian
from tests.scale import rounding
from tests.scale.processes import run_ranks

SAME = 0.999  # of the codes: a sum's rounding moves a weight over the middle between two


def test_sums_of_parts_are_the_sums_of_the_whole():
    x, original = torch.randn(2, 8, 40, 24, generator=torch.Generator().manual_seed(0))
    whole, parts = CrossHessian(24), [CrossHessian(24), CrossHessian(24)]
    for number in range(8):
        whole.add(x[number], original[number])
        parts[number % 2].add(x[number], original[number])
    sums = [parts[1].sum, torch.tensor([parts[1].tokens, parts[1].weight], dtype=torch.float64)]
    others = iter([*sums, parts[1].change])
    parts[0].reduce(lambda part: part + next(others))
    bound = 1e-6 * float(whole.value().diagonal().mean())
    assert parts[0].tokens == whole.tokens == 320
    assert float((parts[0].value() - whole.value()).abs().max()) < bound
    assert float((parts[0].cross() - whole.cross()).abs().max()) < bound


@pytest.mark.slow
def test_two_processes_round_as_one(tmp_path):
    target = rounding.target(tmp_path / "target")
    run_ranks(rounding.quantize_all, 2, str(target), str(tmp_path / "two"))
    left = sorted(path.name for path in (tmp_path / "two").iterdir())
    assert left == sorted(rounding.CASES), "nothing else is left"
    for case in rounding.CASES:
        one, two = rounding.quantize(target, tmp_path / "one", case), open_checkpoint(tmp_path / "two" / case)
        ours, theirs = (load_file(one.path / "model.safetensors"), load_file(two.path / "model.safetensors"))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            if case != "refined":  # whose scales follow H, which turns its last bits into other codes
                assert float((tensor == theirs[name]).float().mean()) >= SAME, (case, name)
        errors = [[row["error"] for row in each.card.details["layers"]] for each in (one, two)]
        tokens = [[row["tokens"] for row in each.card.details["layers"]] for each in (one, two)]
        assert tokens[0] == tokens[1]
        assert sum(errors[0]) == pytest.approx(sum(errors[1]), rel=0.05), case


@pytest.mark.slow
def test_a_sweep_that_two_began_three_end(tmp_path):
    target = rounding.target(tmp_path / "target")
    out = str(tmp_path / "out")
    run_ranks(rounding.start_and_stop, 2, str(target), out)
    blocks = sorted(path.name[:11] for path in (tmp_path / "out" / ".gptq.work" / "blocks").glob("block-*"))
    assert blocks == ["block-00000", "block-00001"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob(".gptq.work/blocks/block-*")}
    run_ranks(rounding.go_on, 3, str(target), out, {str(path): time for path, time in before.items()})
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["gptq"]
    rounding.quantize(target, tmp_path / "one", "gptq")
    files = [load_file(tmp_path / name / "gptq" / "model.safetensors") for name in ("one", "out")]
    for name, tensor in files[0].items():
        assert float((tensor == files[1][name]).float().mean()) >= SAME, name


@pytest.mark.slow
def test_two_processes_train_under_quantization_as_one(tmp_path):
    target = rounding.target(tmp_path / "target")
    run_ranks(rounding.train, 2, str(target), str(tmp_path / "two"))
    curves = [rounding.train(target, tmp_path / "one"), open_checkpoint(tmp_path / "two")]
    one, two = (checkpoint.card.details["curve"] for checkpoint in curves)
    assert [row["step"] for row in one] == [row["step"] for row in two]
    for ours, theirs in zip(one, two, strict=True):
        assert ours == pytest.approx(theirs, rel=0.01)
