"""Whole verbs on a device that is none (pretended_device.py): nothing mixes devices, results are the CPU's,
and the host waits for the device where it is said here."""

from __future__ import annotations

import pytest
import torch

import attar
from attar.checkpoint import open_checkpoint
from attar.formats.readers import Decoded
from attar.runtime.kv.store import STORES
from attar.runtime.llm import LLM
from attar.runtime.runner.device.runner import KV_DTYPES
from attar.runtime.sampling.params import SamplingParams
from tests import tiny_models
from tests.cases import mostly_slow
from tests.marks import slow_but
from tests.pretended_device import NAME, MixedDevicesError, pretended
from tests.test_devices import close

DEVICE = str(NAME)
PROMPTS = [[5, 9, 12, 7, 5, 9], [8, 8, 31]]
TEXT = "The quick brown fox jumps over the lazy dog. " * 200


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    return tiny_models.save(tiny_models.build("llama3", **sizes), tmp_path_factory.mktemp("model") / "llama3")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return {"data": str(path), "sequence_length": 16}


def test_a_mix_is_an_error_and_a_read_is_counted():
    with pretended() as device:
        x = torch.ones(3, device=NAME)
        with pytest.raises(MixedDevicesError, match=r"aten.add.Tensor .* of \(3,\) on the CPU"):
            x + torch.ones(3)
        assert (x + 1).device == NAME and x.mul_(2) is x and not device.reads
        assert float(x.sum()) == 6 and x.tolist() == [2, 2, 2] and x.cpu().device.type == "cpu"
        assert len(x[x > 1]) == 3 and device.reads.total() == 4


EXACT = {"precision": "fp32"}
VERBS = {
    "quantize rtn": ("quantize", {"scheme": "W4A16", "method": "rtn", "group_size": 32}),
    "quantize gptq": ("quantize", {"scheme": "W8A16", "method": "gptq", "group_size": 32, **EXACT}),
    "quantize awq": ("quantize", {"scheme": "W8A16", "method": "awq", "group_size": 32, **EXACT}),
    "quantize yaqa": ("quantize", {"scheme": "W8A16", "method": "yaqa", "group_size": 32, **EXACT}),
    "quantize fp8": ("quantize", {"scheme": "FP8", "method": "rtn"}),
    "prune wanda": ("prune", {"method": "wanda", **EXACT}),
    "prune sparsegpt": ("prune", {"method": "sparsegpt", **EXACT}),
    "prune neurons": ("prune", {"method": "neurons", "ratio": 0.25}),
    "prune layers": ("prune", {"method": "layers", "ratio": 0.5}),
}
KEPT = {  # a batch's states between blocks, sums of a criterion, and whether a row is packed: on the host
    "sensitivity/gradients.py:_logits",
    "walks/offloaded_model.py:_record",
    "walks/offloaded_model.py:__setitem__",
    "walks/block_runner.py:_replace",
    "importance/scoring.py:total",
    "importance/scoring.py:forward",
}


@pytest.mark.parametrize("case", slow_but(VERBS, "prune neurons"))
def test_a_verb_on_the_device_is_what_it_is_on_the_cpu(case, model, text, tmp_path):
    """However many rows there are, the host waits as often, but for what it keeps of each batch."""
    verb, settings = VERBS[case]
    if case != "quantize rtn":
        settings = {**settings, **text}
    reads = []
    for samples in (8, 32) if "data" in settings else (0,):
        rows = {"samples": samples} if samples else {}
        with pretended() as device:
            getattr(attar, verb)(
                str(model), out=str(tmp_path / f"{samples}"), device=DEVICE, **settings, **rows
            )
        reads.append({line: count for line, count in device.reads.items() if line not in KEPT})
    assert reads[0] == reads[-1]
    getattr(attar, verb)(str(model), out=str(tmp_path / "cpu"), device="cpu", **settings, **rows)
    if case != "quantize awq":  # near scales of equal loss, it may choose another
        close(decoded(tmp_path / f"{samples}"), decoded(tmp_path / "cpu"))


def decoded(folder):
    """Weights as numbers, by name."""
    view = Decoded(open_checkpoint(folder))
    return {name: view.load(name).float() for name in view.tensors}


TRAINED = {
    "distill": {"layers": 1},
    "distill features": {"layers": 1, "features": ("hidden",)},
    "recover": {"teacher": "model"},
    "quantize qat": {"scheme": "W8A16", "method": "qat", "group_size": 32},
}
A_STEP = {"walks/train.py:<genexpr>": 1, "walks/train.py:_step": 1}  # its loss, and the size of its gradient
ASKED = {  # in a pass transformers asks whether its rows are packed, QAT and features which tokens are there
    "distillation/outputs.py:run_model": 2,
    "distillation/features/hidden.py:of_pair": 2,
    "walks/objectives.py:soft": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TRAINED)
def test_a_step_of_training_waits_for_its_loss_alone(case, model, text, tmp_path):
    verb = case.partition(" ")[0]
    settings = {name: str(model) if value == "model" else value for name, value in TRAINED[case].items()}
    reads, shared = [], {**settings, **text, "batch_size": 2, "precision": "fp32"}
    for steps in (2, 5):
        with pretended() as device:
            getattr(attar, verb)(
                str(model), out=str(tmp_path / f"{steps}"), device=DEVICE, steps=steps, **shared
            )
        reads.append(device.reads)
    more = reads[1] - reads[0]
    assert all(more.pop(line, 0) in (0, 3 * count) for line, count in ASKED.items())
    assert more == {line: 3 * count for line, count in A_STEP.items()}
    getattr(attar, verb)(str(model), out=str(tmp_path / "cpu"), device="cpu", steps=5, **shared)
    close(decoded(tmp_path / "5"), decoded(tmp_path / "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("head", ["medusa", "eagle3", "dspark"])
def test_a_head_is_trained_as_on_the_cpu(head, model, text, tmp_path):
    """Rows that the target writes, steps, what is measured; a step waits where the head's loss chooses its
    positions, as often as the step before."""
    shared = {**text, "head": head, "drafts": 2, "batch_size": 2, "precision": "fp32"}
    reads = []
    for steps in (2, 4, 6):
        with pretended() as device:
            attar.train_head(str(model), out=str(tmp_path / f"{steps}"), device=DEVICE, steps=steps, **shared)
        reads.append(device.reads)
    assert reads[2] - reads[1] == reads[1] - reads[0]
    attar.train_head(str(model), out=str(tmp_path / "cpu"), device="cpu", steps=6, **shared)
    close(decoded(tmp_path / "6"), decoded(tmp_path / "cpu"))


@pytest.mark.parametrize(
    ("runner", "kv_dtype"),
    mostly_slow(
        [*(("modules", name) for name in STORES), *(("device", name) for name in KV_DTYPES)],
        [("modules", "kivi4"), ("device", "bfloat16")],
    ),
)
def test_a_text_is_that_of_the_cpu_and_a_step_is_read_once(runner, kv_dtype, model):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    options = {"runner": runner, "kv_dtype": kv_dtype, "dtype": "float32", "kv_tokens": 512}
    options |= {"block_size": 32} if kv_dtype.startswith("kivi") else {}
    texts, reads = [], []
    for place in (DEVICE, "cpu"):
        with pretended() as device:
            llm = LLM(str(model), device=place, **options)
            results = llm.generate(PROMPTS, params)
        texts.append([result.token_ids for result in results])
        reads.append(device.reads)
    assert texts[0] == texts[1]
    assert reads == [{"runtime/sampling/warp.py:argmax": 6}, {}]


@pytest.mark.slow
def test_losses_are_those_of_the_cpu(model, text):
    measured = []
    for place in (DEVICE, "cpu"):
        with pretended():
            measured.append(attar.evaluate(str(model), device=place, tokens=512, data=text["data"]))
    assert measured[0].perplexity == pytest.approx(measured[1].perplexity, rel=1e-4)
