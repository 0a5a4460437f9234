"""`make gpu`'s parts for kernels end on a CPU, with tables that say what they should."""

import torch

from benchmarks import gpu_kernels

CPU = torch.device("cpu")


def test_operators_are_compared_with_float64(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "SHAPES", ((1024, 2048),))
    monkeypatch.setattr(gpu_kernels, "WIDTHS", (3,))
    header, row = gpu_kernels.operators(CPU)
    assert row[:2] == ("64 x 128", "3") and row[-1] == "yes" and len(header) == len(row)
    assert all(float(error) < 1e-5 for error in row[2:5])


def test_speed_has_a_row_for_each_product_and_says_why_a_peer_has_none(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "shrunk", lambda shape, device: (32, 128))
    header, *rows = gpu_kernels.speed(CPU)
    assert len(rows) == 3 * (2 + 2 * len(gpu_kernels.SPEED_WIDTHS) + 2)
    assert all(len(row) == len(header) for row in rows) and rows[0][0] == "bfloat16 by cublas"
    assert {row[2][:27] for row in rows if "humming" in row[0]} == {"failed: ModuleNotFoundError"}


def test_gptq_of_a_layer_is_better_than_rounding_to_nearest(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "LAYER", {"q": (512, 2048), "down": (512, 4096)})
    _, *rows = gpu_kernels.gptq_layer(CPU)
    assert [row[0] for row in rows] == ["q", "down", "32 layers"]
    assert all(0 < float(row[3]) < 0.95 for row in rows[:2])
