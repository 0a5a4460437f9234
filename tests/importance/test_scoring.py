"""Sums of scores survive a kill, and a batch is measured once."""

import pytest
import torch

from attar.importance import scoring as module
from tests import tiny_models
from tests.pruning.scored import scored, scoring


def test_a_killed_scoring_goes_on_after_its_last_batch_to_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAVE_SECONDS", -1.0)
    model = tiny_models.build("llama3")
    batches = list(tiny_models.tokens(model, batch=6, length=8).split(1))
    measured = []

    def kill(model, args, kwargs):
        measured.append(1)
        if len(measured) == 4:
            raise KeyboardInterrupt

    hook = model.register_forward_pre_hook(kill, with_kwargs=True)
    with pytest.raises(KeyboardInterrupt):
        scored(model, "neurons", "activation", batches, tmp_path / "killed")
    first = scored(model, "neurons", "activation", batches, tmp_path / "killed")
    assert len(measured) == 4 + 3  # the killed batch once more, and the two after it
    hook.remove()
    whole = scored(model, "neurons", "activation", batches, tmp_path / "whole")
    assert torch.equal(first, whole)
    files = [(tmp_path / name / "activation-0-of-1.safetensors").read_bytes() for name in ("killed", "whole")]
    assert files[0] == files[1]


def test_layers_measured_before_a_kill_are_not_measured_again(tmp_path, monkeypatch):
    model = tiny_models.build("llama3")
    batches = [tiny_models.tokens(model)]
    whole = scored(model, "layers", "kl", batches, tmp_path / "whole")
    plain, count = module.atomic.save_tensors, []

    def kill(*args, **kwargs):
        plain(*args, **kwargs)
        count.append(1)
        if len(count) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(module.atomic, "save_tensors", kill)
    with pytest.raises(KeyboardInterrupt):
        scored(model, "layers", "kl", batches, tmp_path / "killed")
    assert torch.equal(scored(model, "layers", "kl", batches, tmp_path / "killed"), whole)
    assert len(count) == 3


def test_the_pass_ends_where_nothing_more_is_looked_at(tmp_path):
    model = tiny_models.build("llama3")
    ran = []
    for name in ("lm_head", "model.norm"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    batches = [tiny_models.tokens(model)]
    scored(model, "neurons", "activation", batches, tmp_path)
    scored(model, "layers", "influence", batches, tmp_path)
    assert ran == []
    scored(model, "hidden", "activation", batches, tmp_path)
    assert ran == ["model.norm"]


def test_sums_are_in_float64_whatever_the_passes_are(tmp_path):
    model = tiny_models.build("llama3")
    task = scoring(model, "neurons", [tiny_models.tokens(model)], tmp_path, precision="bf16")
    seen = []
    total = task.total("x", lambda batch: seen.append(model(input_ids=batch).logits.dtype) or torch.ones(2))
    assert total.dtype == torch.float64 and seen == [torch.bfloat16]
