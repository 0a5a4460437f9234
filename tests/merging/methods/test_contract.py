"""What every merge method promises, method by method."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attar.errors import SettingsError
from attar.merging.methods import METHODS, MergeMethod
from attar.merging.methods.common.chunked import SIZE
from attar.merging.methods.common.random_masks import RandomMasks

SHAPES = [(7,), (1,), (37, 53), (3, 5, 7), (2, SIZE // 2 + 51)]
DTYPES = (torch.float32, torch.bfloat16)
GIVEN: dict[str, Any] = {"t": 0.3}
PER_MODEL: dict[str, list[Any]] = {
    "weight": [0.5, 0.4, 0.3],
    "density": [0.6, 0.5, 0.4],
    "gamma": [0.1, 0.05, 0.02],
    "epsilon": [0.1, 0.15, 0.2],
    "scale": [0.7, None, 1.0],
}
OF_TASK_VECTORS = (
    "task_arithmetic",
    "ties",
    "dare_linear",
    "dare_ties",
    "della",
    "della_linear",
    "breadcrumbs",
    "breadcrumbs_ties",
)


def inputs(
    method: MergeMethod, shape: Sequence[int], dtype: torch.dtype
) -> tuple[list[Tensor], Tensor | None]:
    """As many models as the method takes (three where it takes any number), near a base."""
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(*shape, generator=generator)
    count = min(3, method.models[1] or 3)
    tensors = [(base + 0.1 * torch.randn(*shape, generator=generator)).to(dtype) for _ in range(count)]
    return tensors, base.to(dtype) if method.base == "required" else None


def run(method: MergeMethod, tensors: list[Tensor], base: Tensor | None, **given: Any) -> Tensor:
    """The method with its defaults, the values above, and those given."""
    values = GIVEN | given
    shared = {p.name: values.get(p.name, p.default) for p in method.shared}
    per_model = {p.name: values.get(p.name, PER_MODEL[p.name][: len(tensors)]) for p in method.per_model}
    method.check(shared, per_model)
    masks = [RandomMasks.of(0, "t", str(i)) for i in range(len(tensors))]
    return method.merge(
        tensors, base, shared=shared, per_model=per_model, masks=masks, compat=given.get("compat", "mergekit")
    )


@pytest.mark.few(40)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_shape_dtype_inputs_and_repetition(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    method = METHODS[name]
    tensors, base = inputs(method, shape, dtype)
    before = [x.clone() for x in tensors], None if base is None else base.clone()
    compats = ("mergekit", "paper") if method.paper else ("mergekit",)
    for compat in compats:
        result = run(method, tensors, base, compat=compat)
        assert result.shape == torch.Size(shape)
        assert result.dtype == dtype
        assert result.isfinite().all()
        assert torch.equal(result, run(method, tensors, base, compat=compat))
    assert all(torch.equal(a, b) for a, b in zip(before[0], tensors, strict=True))
    assert base is None or torch.equal(before[1], base)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", METHODS)
def test_the_number_of_threads_does_not_matter(name: str) -> None:
    tensors, base = inputs(METHODS[name], (3, SIZE // 2), torch.float32)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(run(METHODS[name], tensors, base))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", METHODS)
def test_the_size_of_the_pieces_does_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, base = inputs(METHODS[name], (40, 64), torch.float32)
    whole = run(METHODS[name], tensors, base)
    for module in ("methods.common.chunked", "methods.model_stock", "methods.arcee_fusion"):
        monkeypatch.setattr(sys.modules[f"attar.merging.{module}"], "SIZE", 640)
    pieces = run(METHODS[name], tensors, base)
    assert torch.allclose(whole, pieces, rtol=0, atol=1e-6 if METHODS[name].random else 0)


# passthrough takes one model; ramplus_tl and arcee_fusion change what they are given by design
IDENTICAL = [name for name in METHODS if name not in ("passthrough", "ramplus_tl", "arcee_fusion")]


@pytest.mark.parametrize("name", IDENTICAL)
def test_identical_models_give_that_model(name: str) -> None:
    """With weights that sum to 1 and nothing dropped."""
    method = METHODS[name]
    tensors, base = inputs(method, (6, 11), torch.float32)
    tensors = [tensors[0].clone() for _ in tensors]
    if name in ("nearswap", "slerp"):
        base = tensors[0].clone()
    n = len(tensors)
    ones: dict[str, Any] = {"weight": [1 / n] * n, "density": [1.0] * n}
    result = run(method, tensors, base, **ones)
    assert torch.allclose(result, tensors[0], rtol=1e-4, atol=1e-5)


BASED = [name for name, method in METHODS.items() if method.base == "required" and name != "model_stock"]


@pytest.mark.parametrize("name", BASED)
def test_models_equal_to_the_base_give_the_base(name: str) -> None:
    tensors, base = inputs(METHODS[name], (6, 11), torch.bfloat16)
    assert base is not None
    assert torch.equal(run(METHODS[name], [base.clone() for _ in tensors], base), base)


def test_model_stock_of_models_equal_to_the_base() -> None:
    tensors, base = inputs(METHODS["model_stock"], (6, 11), torch.float32)
    assert base is not None
    assert torch.allclose(run(METHODS["model_stock"], [base.clone() for _ in tensors], base), base)


SYMMETRIC = ["linear", "karcher", "task_arithmetic", "ties", "breadcrumbs", "model_stock", "sce", "ram"]


@pytest.mark.parametrize("name", SYMMETRIC)
def test_the_order_of_the_models_does_not_matter(name: str) -> None:
    method = METHODS[name]
    tensors, base = inputs(method, (12, 17), torch.float32)
    same: dict[str, Any] = {"weight": [0.4] * 3, "density": [0.5] * 3, "gamma": [0.1] * 3}
    a, b = run(method, tensors, base, **same), run(method, tensors[::-1], base, **same)
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties", "della", "della_linear"])
def test_other_masks_give_another_result(name: str) -> None:
    method = METHODS[name]
    tensors, base = inputs(method, (12, 17), torch.float32)
    shared = {p.name: p.default for p in method.shared}
    per_model = {p.name: PER_MODEL[p.name] for p in method.per_model}
    results = [
        method.merge(
            tensors,
            base,
            shared=shared,
            per_model=per_model,
            masks=[RandomMasks.of(seed, "t", str(i)) for i in range(3)],
        )
        for seed in (0, 1)
    ]
    assert not torch.equal(*results)


BAD: list[tuple[str, str, Any]] = [
    ("ties", "density", [0.5, 0.0, 0.5]),
    ("ties", "density", [0.5, 1.2, 0.5]),
    ("ties", "weight", [0.5, float("nan"), 0.5]),
    ("ties", "weight", [0.5, "much", 0.5]),
    ("ties", "weight", [0.5, True, 0.5]),
    ("ties", "lambda", float("nan")),
    ("ties", "normalize", 1),
    ("linear", "weight", [1.0, -1.0]),
    ("linear", "weight", [0.0, 0.0]),
    ("linear", "weight", [None, 1.0]),
    ("multislerp", "weight", [1.0, -1.0]),
    ("breadcrumbs", "gamma", [0.1, -0.1, 0.1]),
    ("breadcrumbs", "gamma", [1.0, 0.1, 0.1]),
    ("della", "epsilon", [0.45, 0.15, 0.1]),
    ("della", "epsilon", [0.15, 0.6, 0.1]),
    ("slerp", "t", None),
    ("slerp", "t", float("inf")),
    ("nearswap", "t", -0.1),
    ("karcher", "max_iter", 1.5),
    ("karcher", "max_iter", 0),
    ("sce", "select_topk", 0.0),
    ("passthrough", "scale", [float("nan")]),
]


@pytest.mark.parametrize(("name", "parameter", "value"), BAD, ids=lambda value: str(value))
def test_values_that_are_not_allowed(name: str, parameter: str, value: Any) -> None:
    method = METHODS[name]
    shared = {p.name: GIVEN.get(p.name, p.default) for p in method.shared}
    per_model = {p.name: PER_MODEL[p.name] for p in method.per_model}
    (shared if parameter in shared else per_model)[parameter] = value
    with pytest.raises(SettingsError, match=parameter):
        method.check(shared, per_model)


def test_all_weights_zero_give_the_base() -> None:
    for name in OF_TASK_VECTORS:
        tensors, base = inputs(METHODS[name], (6, 11), torch.float32)
        assert base is not None
        assert torch.equal(run(METHODS[name], tensors, base, weight=[0.0] * 3), base)


def test_the_table_agrees_with_the_functions() -> None:
    for method in METHODS.values():
        signature = inspect.signature(method.function)
        keywords = {p.name: p for p in signature.parameters.values() if p.kind == p.KEYWORD_ONLY}
        if any(p.kind == p.VAR_KEYWORD for p in signature.parameters.values()):
            continue  # dare_ties and the like pass everything on
        declared = {p.python_name: p for p in (*method.shared, *method.per_model)}
        assert set(declared) <= set(keywords)
        assert ("masks" in keywords) == method.random
        assert ("compat" in keywords) == method.paper
        for name, parameter in declared.items():
            if parameter in method.shared and not parameter.required:
                assert keywords[name].default == parameter.default
