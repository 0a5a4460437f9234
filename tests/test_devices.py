"""Every verb that takes a device gives on it what the CPU gives.

ATTAR_DEVICE names the device (make gpu); else a GPU, if any. Devices sum in other orders, so weights are
compared by their difference relative to their own size."""

import os

import pytest
import torch

import attar
from attar.checkpoint import open_checkpoint
from tests import tiny_models

DEVICE = os.environ.get("ATTAR_DEVICE", "cuda" if torch.cuda.is_available() else "")
TEXT = "The quick brown fox jumps over the lazy dog. " * 40

pytestmark = pytest.mark.skipif(not DEVICE, reason="no GPU, and ATTAR_DEVICE names no device")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_models.save(tiny_models.build("llama3"), tmp_path_factory.mktemp("model") / "llama3")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def weights(folder):
    checkpoint = open_checkpoint(str(folder))
    return {name: checkpoint.load(name).float() for name in checkpoint.tensors}


def close(ours, theirs, most=0.02):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert float((ours[name] - value).norm()) <= most * float(value.norm()) + 1e-6, name


VERBS = {
    "quantize rtn": ("quantize", {"scheme": "W8A16", "method": "rtn", "group_size": 32}),
    "quantize gptq": ("quantize", {"scheme": "W8A16", "method": "gptq", "group_size": 32, "data": "text"}),
    "prune": ("prune", {"method": "neurons", "ratio": 0.25, "data": "text"}),
    "distill": ("distill", {"layers": 2, "steps": 3, "data": "text"}),
}


@pytest.mark.parametrize("case", VERBS)
def test_a_verb_on_the_device_is_what_it_is_on_the_cpu(case, model, text, tmp_path):
    verb, settings = VERBS[case]
    settings = {name: text if value == "text" else value for name, value in settings.items()}
    results = []
    for folder, device in (("there", DEVICE), ("here", "cpu")):
        getattr(attar, verb)(str(model), out=str(tmp_path / folder), device=device, **settings)
        results.append(weights(tmp_path / folder))
    close(*results)


def test_a_text_through_the_modules_is_that_of_the_cpu(model):
    from attar.runtime.llm import LLM
    from attar.runtime.sampling.params import SamplingParams

    texts = []
    for device in (DEVICE, "cpu"):
        llm = LLM(str(model), device=device, runner="modules", dtype="float32")
        texts.append(llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=0.0)))
    assert texts[0][0].samples[0].token_ids == texts[1][0].samples[0].token_ids
