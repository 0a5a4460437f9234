"""Statistics of task vectors against float64 by hand: pairs, votes, samples, sums over layers."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

from attar.errors import ModelError
from attar.merging.conflicts import ConflictSums, measure_conflicts, stride, summary


def family(models: int, shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32):
    draw = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=draw).to(dtype)
    common = torch.randn(shape, generator=draw)
    items = []
    for _ in range(models):
        delta = 0.1 * (0.5 * common + torch.randn(shape, generator=draw))
        delta[torch.rand(shape, generator=draw) < 0.3] = 0.0
        items.append((base.float() + delta).to(dtype))
    return items, base


def by_hand(tensors, base):
    """The definitions, entry by entry, in Python."""
    b = base.float().flatten().tolist()
    d = [(t.float() - base.float()).flatten().double().tolist() for t in tensors]
    vote = [1 if sum(item) >= 0 else -1 for item in zip(*d, strict=True)]
    length = [math.sqrt(sum(x * x for x in one)) for one in d]
    cosine, agreement = [], []
    for i, j in itertools.combinations(range(len(d)), 2):
        cosine.append(sum(x * y for x, y in zip(d[i], d[j], strict=True)) / length[i] / length[j])
        both = [x * y > 0 for x, y in zip(d[i], d[j], strict=True) if x and y]
        agreement.append(sum(both) / len(both))
    moved = [[(x, v) for x, v in zip(one, vote, strict=True) if x] for one in d]
    return {
        "cosine": cosine,
        "agreement": agreement,
        "norm": [one / math.sqrt(sum(x * x for x in b)) for one in length],
        "overruled": [sum((x > 0) != (v > 0) for x, v in one) / len(one) for one in moved],
    }


@pytest.mark.parametrize("models", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_the_definitions(models, dtype):
    tensors, base = family(models, (31, 17), models, dtype)
    before = [t.clone() for t in (*tensors, base)]
    got, wanted = measure_conflicts(tensors, base).row(), by_hand(tensors, base)
    assert got.keys() == wanted.keys()
    for key, values in wanted.items():
        assert got[key] == pytest.approx(values, rel=6e-4), key
    assert all(torch.equal(a, b) for a, b in zip(before, (*tensors, base), strict=True))


def test_known_points():
    base = torch.ones(4, 4)
    up = base + torch.eye(4)
    same = measure_conflicts([up, up], base).row()
    assert same == {"cosine": [1.0], "agreement": [1.0], "norm": [0.5, 0.5], "overruled": [0.0, 0.0]}
    against = measure_conflicts([up, base - 2 * torch.eye(4)], base).row()
    assert against["cosine"] == [-1.0] and against["agreement"] == [0.0]
    assert against["overruled"] == [1.0, 0.0], "the larger change has the vote"
    tied = measure_conflicts([up, base - torch.eye(4)], base).row()
    assert tied["overruled"] == [0.0, 1.0], "a sum of zero elects +1"
    apart = measure_conflicts([up, base + torch.eye(4).flip(0)], base).row()
    assert apart["cosine"] == [0.0] and apart["agreement"] == [None], "they share no entry"


def test_nothing_changed_and_a_base_of_zero():
    base = torch.zeros(3, 5)
    still = measure_conflicts([base, base + 1], base).row()
    assert still == {"cosine": [None], "agreement": [None], "norm": [None, None], "overruled": [None, 0.0]}
    json.dumps(still, allow_nan=False)


def test_sample_sees_every_column_and_stands_for_the_whole():
    assert stride((64, 64), 4096) == 1
    for shape in ((300, 4096), (4096, 300), (7, 65536 * 3), (1000,), (5, 6, 32)):
        step = stride(shape, 1000)
        assert math.gcd(step, shape[-1]) == 1 and math.prod(shape) / step <= 1000
    wide = torch.zeros(64, 256)
    columns = torch.arange(64 * 256)[:: stride((64, 256), 1024)] % 256
    assert len(columns.unique()) > 200, "no stride that stays on a few columns"
    tensors, base = family(2, (512, 256), 3)
    whole, part = measure_conflicts(tensors, base, 1 << 30), measure_conflicts(tensors, base, 8192)
    assert part.size == whole.size == wide.numel() * 8
    assert part.squares == pytest.approx(whole.squares, rel=0.05)
    for key, values in whole.row().items():
        assert part.row()[key] == pytest.approx(values, abs=0.03), key


def test_sums_add_up():
    tensors, base = family(3, (40, 24), 5)
    parts = [
        measure_conflicts([t[rows] for t in tensors], base[rows]) for rows in (slice(0, 9), slice(9, 40))
    ]
    assert (parts[0] + parts[1]).row() == measure_conflicts(tensors, base).row()


def test_plain_keeps_every_bit():
    conflict = measure_conflicts(*family(3, (13, 7), 7))
    assert ConflictSums.from_plain(json.loads(json.dumps(conflict.plain()))) == conflict


def test_shapes_must_agree():
    with pytest.raises(ModelError, match=r"model 1 is \[2, 3\], the base's is \[3, 2\]"):
        measure_conflicts([torch.zeros(3, 2), torch.zeros(2, 3)], torch.zeros(3, 2))


def conflict_table(models: int = 2, layers: int = 3):
    names = [("model.embed_tokens.weight", None), ("model.norm.weight", None), ("lm_head.weight", None)]
    for layer in range(layers):
        for leaf in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "input_layernorm"):
            names.append((f"model.layers.{layer}.{leaf}.weight", layer))
    return [
        (name, layer, measure_conflicts(*family(models, (8, 6), number)))
        for number, (name, layer) in enumerate(names)
    ]


def test_summary_by_layer_and_part_whatever_the_order():
    rows = summary(conflict_table())
    assert [(row["layer"], row["part"]) for row in rows] == [
        (None, "all"),
        *((layer, part) for layer in range(3) for part in ("attention", "mlp", "norm")),
        (None, "embedding"),
        (None, "head"),
        (None, "norm"),
    ]
    assert rows == summary(reversed(conflict_table()))
    two = [conflict for name, layer, conflict in conflict_table() if layer == 1 and "self_attn" in name]
    attention = next(row for row in rows if (row["layer"], row["part"]) == (1, "attention"))
    assert {key: attention[key] for key in two[0].row()} == (two[0] + two[1]).row()
    assert attention["size"] == 96
    assert rows[0]["size"] == 15 * 48


def test_sums_are_added_in_one_order():
    """In float64, (1e20 - 1e20) + 1 is not (1e20 + 1) - 1e20."""
    one = ConflictSums(1, 1.0, (1.0, 1.0), (1, 1), (0, 0), (1.0,), (1,), (1,))
    parts = [
        (f"model.layers.0.mlp.{leaf}.weight", 0, replace(one, dots=(dot,)))
        for leaf, dot in (("a", 1e20), ("b", -1e20), ("c", 1.0))
    ]
    rows = [summary(order) for order in itertools.permutations(parts)]
    assert all(row == rows[0] for row in rows)
    assert rows[0][0]["cosine"] == [round(1 / 3, 4)]


def test_summary_of_two_stacks_and_of_one_model():
    pair = measure_conflicts(*family(2, (4, 4)))
    rows = summary([(f"{s}.block.0.layer.0.SelfAttention.q.weight", 0, pair) for s in ("encoder", "decoder")])
    assert [row.get("stack") for row in rows] == [None, "decoder.block", "encoder.block"]
    assert summary([]) == []
    assert summary([("a.weight", None, measure_conflicts(*family(1, (4, 4))))]) == []


@pytest.mark.slow
def test_a_hundred_layers_of_six_models_stay_small():
    rows = summary(conflict_table(6, 100))
    assert len(json.dumps(rows)) < 250_000
