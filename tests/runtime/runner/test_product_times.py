"""A card's table of products, with a timer that is none: what is measured, kept, and taken."""

from __future__ import annotations

import pytest
import torch

from attar.cli import bench
from attar.errors import SettingsError
from attar.kernels.kv_codes import encode
from attar.planner import speed
from attar.progress import SILENT
from attar.runtime.kernel_times import KernelShape, KernelTimes, read_times
from attar.runtime.runner.device import packer, product_times, runner
from attar.runtime.runner.device.layout import DENSE
from attar.runtime.runner.device.product_times import (
    candidates,
    dense_kernel,
    device_times,
    product_calls,
    rounded_product,
)
from tests import tiny_models

CPU = torch.device("cpu")
OURS, THEIRS = "bfloat16 by triton", "bfloat16 by cublas"


@pytest.mark.parametrize(
    ("bits", "capability", "names"),
    [
        (DENSE, (9, 0), ["triton", "cublas"]),
        (DENSE, (7, 5), ["cublas"]),
        (3, (9, 0), ["triton", "humming"]),
        (3, (7, 0), []),
        (8, (9, 0), ["triton", "humming", "int_mm", "scaled_mm"]),
        (8, (8, 0), ["triton", "humming", "int_mm"]),
    ],
)
def test_kernels_of_a_card(bits, capability, names):
    assert candidates(bits, capability, triton=True, humming=True) == names
    own = [name for name in names if name not in ("triton", "humming")]
    assert candidates(bits, capability, triton=False, humming=False) == own


def hopper(bits):
    return candidates(bits, (9, 0), triton=True, humming=True)


class Timer:
    """Runs every product once, and says how long it took."""

    def __init__(self, **seconds):
        self.shapes, self.seconds = [], seconds

    def __call__(self, shape, calls, device):
        self.shapes.append(shape)
        assert all(call().shape == (shape.tokens, shape.rows) for call in calls)
        return self.seconds.get(shape.format.rpartition(" ")[2], 1.0) * shape.tokens


def test_what_the_table_lacks_is_measured_and_kept(tmp_path, caplog):
    """Every kernel of every width, in its file after each; Humming, which is not here, is a line."""
    path, timer = tmp_path / "products.yaml", Timer(triton=2.0)
    given = {"card": "a card, sm_90", "kernels": hopper, "timer": timer}
    table = device_times([(32, 64), (32, 64)], (1, 3), path, CPU, **given)
    formats = [OURS, THEIRS, *(f"int{bits} by triton" for bits in (2, 3, 4, 5, 6, 8))]
    formats += ["int8 by int_mm", "fp8 by scaled_mm"]
    assert sorted(table.seconds) == sorted(KernelShape(name, 32, 64, M) for name in formats for M in (1, 3))
    assert table.seconds[KernelShape(OURS, 32, 64, 3)] == 6.0
    assert caplog.text.count("by humming, 1 rows: ModuleNotFoundError") == 6
    measured = len(timer.shapes)
    assert device_times([(32, 64)], (1, 3), path, CPU, **given) == table and len(timer.shapes) == measured
    device_times([(32, 64)], (1,), path, CPU, **{**given, "card": "another, sm_80"})
    assert len(timer.shapes) == measured + len(formats), "another card is measured anew"
    path.write_text("kernels: 3")
    device_times([(32, 64)], (1,), path, CPU, **given)
    assert len(timer.shapes) == measured + 2 * len(formats), "and so is what a damaged file had"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [1, 20])
def test_products_of_rounded_rows(dtype, rows):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=generator) for n in (rows, 48))
    codes, scales = encode(weight, dtype)
    of_rows, row_scales = encode(x, dtype)
    wanted = (of_rows.double() * row_scales) @ (codes.double() * scales).T
    torch.testing.assert_close(
        rounded_product(x, codes, scales).double(), wanted, rtol=0.01, atol=0.01, check_dtype=False
    )


def test_a_median_is_of_all_calls():
    shape = KernelShape(THEIRS, 32, 64, 2)
    calls = product_calls("cublas", DENSE, shape, CPU)
    assert 0 < product_times.median_seconds(shape, calls, CPU) < 1


@pytest.mark.parametrize(
    ("ours", "theirs", "kernel"),
    [({1: 2, 64: 1}, {1: 1, 64: 1.5}, "cublas"), ({1: 2, 64: 1}, {1: 2, 64: 3}, ""), ({1: 2}, {64: 1}, "")],
)
def test_one_kernel_for_any_number_of_rows(ours, theirs, kernel):
    seconds = {KernelShape(OURS, 8, 16, M): float(s) for M, s in ours.items()}
    seconds |= {KernelShape(THEIRS, 8, 16, M): float(s) for M, s in theirs.items()}
    table = KernelTimes("", 0, seconds)
    assert dense_kernel(table, 8, 16) == kernel
    assert dense_kernel(table, 16, 8) == dense_kernel(None, 8, 16) == ""


def test_a_table_is_taken_where_it_is_asked_for_and_of_this_card(tmp_path, monkeypatch):
    cuda, table = torch.device("cuda:7"), KernelTimes("a card, sm_90", 0, {KernelShape(OURS, 8, 16, 1): 1.0})
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path))
    monkeypatch.setattr(product_times, "card_name", lambda device: "a card, sm_90")
    table.write(tmp_path / "products.yaml")

    def read(device):
        product_times.fastest.cache_clear()
        return product_times.fastest(device)

    assert read(cuda) is None, "texts that do not depend on their batch are the default"
    monkeypatch.setenv("ATTAR_PRODUCTS", "fastest")
    assert read(cuda) == table and read(CPU) is None
    monkeypatch.setattr(product_times, "card_name", lambda device: "another")
    assert read(cuda) is None
    product_times.fastest.cache_clear()


def test_a_runner_multiplies_by_what_the_table_says(monkeypatch):
    model = tiny_models.build("llama3")
    head = (tiny_models.VOCABULARY, model.config.hidden_size)
    seconds = {KernelShape(OURS, *head, 1): 2.0, KernelShape(THEIRS, *head, 1): 1.0}
    monkeypatch.setattr(packer, "fastest", lambda device: KernelTimes("", 0, seconds))
    actual = runner.device_runner(model.config, model.state_dict(), blocks=4)
    assert actual.facts["weights"] == "float32 by torch and float32 by cublas"
    states = torch.randn(3, head[1])
    torch.testing.assert_close(actual.head_product(states), states @ model.lm_head.weight.detach().T)


def test_the_command_on_a_card(tmp_path, monkeypatch):
    """With a card that is none: the products of a model, at the batches that were asked for."""
    folder = tiny_models.save(tiny_models.build("llama3"), tmp_path / "llama3", dtype=torch.bfloat16)
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path))
    with pytest.raises(SettingsError, match="must be a card"):
        speed.device_kernels(folder, [1], "auto", SILENT)
    monkeypatch.setattr("attar.models.loading.device.pick_device", torch.device)
    monkeypatch.setattr(runner, "register_kernels", lambda device: None)
    monkeypatch.setattr(product_times, "card_name", lambda device: "a card, sm_90")
    monkeypatch.setattr(product_times, "kernels_of", lambda device, triton: hopper)
    monkeypatch.setattr(product_times, "product_calls", lambda *words: [])
    monkeypatch.setattr(product_times, "median_seconds", lambda *words: 1e-5)
    monkeypatch.setattr(speed, "_step", lambda checkpoint, batch, device, progress: batch * 1.0)
    other = KernelShape("int4 by triton", 3, 5, 1)  # of another model
    KernelTimes("a card, sm_90", 0, {other: 1e-5}).write(tmp_path / "products.yaml")
    answer = bench._kernels(str(folder), (1, 8), "cuda", SILENT)
    (tmp_path / "card.yaml").write_text(answer.text)
    printed, kept = (
        read_times(tmp_path / name, product_times.FORMATS) for name in ("card.yaml", "products.yaml")
    )
    assert kept.seconds == {**printed.seconds, other: 1e-5} and other not in printed.seconds
    assert printed.overhead == pytest.approx({1: 1.0, 8: 8.0}, rel=1e-3) and not kept.overhead
    assert {row["tokens"] for row in answer.data["kernels"]} == {1, 8}
    assert answer.data["machine"] == "a card, sm_90"
