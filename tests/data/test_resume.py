"""A stage that was interrupted goes on only with the text it began with."""

import hashlib
from contextlib import contextmanager

import pytest
from safetensors.torch import load_file

from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.distillation.settings import recover_settings
from attar.distillation.stage import recover
from attar.pruning.settings import prune_settings
from attar.pruning.stage import prune
from attar.quantization.settings import quantize_settings
from attar.quantization.stage import quantize
from tests import tiny_models
from tests.data.test_splits import prose

ROWS = {"sequence_length": 64, "batch_size": 4}
SWEEP = {"samples": 4, **ROWS}


class Interrupted:
    """A progress that is interrupted at the second step of a task."""

    def __init__(self, what):
        self.what = what

    def log(self, line):
        pass

    @contextmanager
    def task(self, what, total, done=0):
        yield Interrupting(what == self.what)


class Interrupting:
    def __init__(self, armed):
        self.armed, self.steps = armed, 0

    def advance(self, n=1, **numbers):
        self.steps += 1
        if self.armed and self.steps == 2:
            raise KeyboardInterrupt


def gptq(model, out, data, **more):
    settings = quantize_settings(
        method="gptq", group_size=32, check_tokens=0, scales="absmax", refine=0, data=data, **SWEEP
    )
    return quantize(model, out, settings, **more)


def retrain(model, out, data, **more):
    settings = recover_settings(steps=4, checkpoint_every=1, precision="fp32", data=data, **ROWS)
    return recover(model, out, settings, teacher=model, **more)


@pytest.mark.parametrize(
    ("stage", "task"), [(gptq, "gptq"), pytest.param(retrain, "recover", marks=pytest.mark.slow)]
)
def test_with_another_text_an_interrupted_stage_starts_over(tmp_path, stage, task):
    model = tiny_models.save(tiny_models.build("smollm"), tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(prose(30, seed=1))
    with pytest.raises(KeyboardInterrupt):
        stage(model, tmp_path / "out", str(text), progress=Interrupted(task))
    assert (tmp_path / ".out.work").is_dir(), "something is there to go on from"
    text.write_text(prose(30, seed=2))
    resumed = stage(model, tmp_path / "out", str(text))
    fresh = stage(model, tmp_path / "fresh", str(text))
    assert digest(resumed) == digest(fresh)
    assert resumed.card.key == fresh.card.key


def digest(checkpoint):
    state = load_file(checkpoint.path / "model.safetensors")
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (prune, prune_settings(method="heads", samples=2, data="DATA")),
        (export, ExportSettings(format="dense", data="DATA")),
    ],
)
def test_the_key_of_every_stage_holds_the_text(tmp_path, stage, settings):
    from dataclasses import replace

    model = tiny_models.save(tiny_models.build("smollm"), tmp_path / "model")
    keys = []
    for seed in (1, 2, 1):
        (tmp_path / "text.txt").write_text(prose(30, seed=seed))
        result = stage(model, tmp_path / "out", replace(settings, data=f"{tmp_path}/text.txt"), force=True)
        keys.append(result.card.key)
    assert keys[0] == keys[2] != keys[1]
