"""2:4 models: packed as such where that is faster, said so, and with the logits of the dense form."""

import pytest
import torch

from attar.runtime.runner import sparse_choice
from attar.runtime.runner.compiled import compiled
from attar.runtime.runner.sparse_choice import sparse_pays
from attar.runtime.step import StepInput, TokenSpan
from tests import tiny_models
from tests.compiler import needs_compiler

pytestmark = needs_compiler

PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def measured(monkeypatch):
    """What is measured: True, 2:4 is faster; by kind."""
    answers = {"int4": True, "int8": True, "bf16": True}
    monkeypatch.setattr(sparse_choice, "_pays", lambda kind, **settings: answers[kind])
    return answers


@pytest.fixture(scope="module")
def model():
    """Two of each four inputs of every Linear of the layers are zero."""
    result = tiny_models.build("llama3")
    with torch.no_grad():
        for name, weight in result.named_parameters():
            weight.copy_(weight.bfloat16().float())
            if name.split(".")[-2] in PARTS:
                fours = weight.unflatten(1, (-1, 4))
                fours.masked_fill_(fours.abs().argsort(2).argsort(2) < 2, 0.0)
    return result


def logits(model, **settings):
    """Of a prompt, and of four tokens after it one by one; facts and bytes of weights."""
    runner = compiled(model.config, model.state_dict(), blocks=8, threads=2, kv_dtype="float32", **settings)
    ids = torch.randint(2, tiny_models.VOCABULARY, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [runner.run(StepInput(ids[:36], (TokenSpan(0, 0, 36, (2, 0, 1), 36),)))]
    rows += [
        runner.run(StepInput(ids[n : n + 1], (TokenSpan(0, n, n + 1, (2, 0, 1), 1),))) for n in range(36, 40)
    ]
    facts, nbytes = runner.facts, runner.weights.nbytes
    runner.close()
    return torch.cat(rows), facts["weights"], nbytes


@pytest.mark.parametrize(
    ("weights", "bits"), [("int4", 16), ("int4", 8), ("int8", 16), ("int8", 8), ("bf16", 16)]
)
def test_logits_are_those_of_the_dense_form(weights, bits, model, measured):
    sparse, label, nbytes = logits(model, weights=weights, bits=bits)
    measured[weights] = False
    dense, dense_label, dense_bytes = logits(model, weights=weights, bits=bits)
    assert torch.equal(sparse, dense)
    assert label == f"{weights} 2:4" and dense_label == f"{weights} (2:4, run dense: no faster here)"
    assert nbytes < dense_bytes


def test_one_dense_matrix_stays_dense(model, measured):
    """The choice is made matrix by matrix, and both forms are said."""
    state = dict(model.state_dict())
    name = "model.layers.0.mlp.down_proj.weight"
    state[name] = state[name] + 1.0
    runner = compiled(model.config, state, blocks=4, threads=1, weights="int8")
    assert runner.weights.layers[0].down.form == "dense"
    assert runner.facts["weights"] == "int8 2:4 and int8"
    runner.close()


def test_dense_models_are_not_measured(monkeypatch):
    monkeypatch.setattr(sparse_choice, "_pays", lambda kind, **settings: pytest.fail("measured"))
    model = tiny_models.build("llama3")
    compiled(model.config, model.state_dict(), blocks=4, threads=1, weights="int4").close()


def test_the_faster_form_is_taken(monkeypatch):
    """Seconds of both forms, by the bytes of their weights."""

    class Pool:
        def __init__(self, threads):
            self.threads = threads

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def multiply(self, x, packed, *, bits):
            clock[0] += slowness[packed.form] * packed.nbytes

    clock, slowness = [0.0], {"dense": 1.0}
    monkeypatch.setattr(sparse_choice, "ThreadPool", Pool)
    monkeypatch.setattr(sparse_choice.time, "perf_counter", lambda: clock[0])
    for slowness["2:4"], expected in ((1.0, True), (2.0, False)):
        sparse_choice._pays.cache_clear()
        assert [sparse_pays(16, 1)(kind) for kind in ("int4", "int8", "bf16")] == [expected] * 3
    sparse_choice._pays.cache_clear()


def test_without_kernels_the_dense_form_is_taken(monkeypatch):
    monkeypatch.setattr(sparse_choice, "library", lambda: None)
    sparse_choice._pays.cache_clear()
    assert not sparse_pays(16, 1)("int4")
    sparse_choice._pays.cache_clear()
