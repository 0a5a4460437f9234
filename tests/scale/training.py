"""Short runs of the train walk that one process and several must end alike."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from attar.checkpoint.processes import SHARD, rank
from attar.data.examples import Examples
from attar.data.packing import PADDING
from attar.distillation.feature_settings import StudentFeatureSettings
from attar.distillation.features.probe import make_features
from attar.distillation.learn import divided
from attar.distillation.loss import DistillationLoss
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.signals.online import OnlineTeacher
from attar.models.frozen import round_frozen
from attar.models.head import head_of
from attar.walks import optimizers
from attar.walks.distributed import blocks_of, gathered, shards
from attar.walks.masks import Masks
from attar.walks.settings import TrainSettings
from attar.walks.train import train
from tests import tiny_models

SETTINGS = TrainSettings(
    steps=5,
    batch_size=4,
    sequence_length=12,
    learning_rate=1e-3,
    checkpoint_every=2,
    evaluate_every=2,
    precision="fp32",
)
CASES = {
    "plain": ("llama3", {}),
    "tied": ("smollm", {"accumulate": 2}),
    "uneven": ("smollm", {"accumulate": 3, "batch_size": 3}),
    "masks": ("llama3", {"accumulate": 2}),
    "frozen": ("smollm", {}),
    "checkpointing": ("qwen3", {"gradient_checkpointing": True}),
    "muon": ("llama3", {"optimizer": "muon"}),
    "teacher": ("smollm", {"accumulate": 2}),
    "features": ("smollm", {"accumulate": 2}),
    "bf16": ("smollm", {"precision": "bf16"}),
    "patience": ("llama3", {"patience": 2, "evaluate_every": 1, "learning_rate": 0.05}),
}


class Stop(BaseException):
    """Stands for a kill between two steps."""


def examples():
    """Rows of different lengths, so that processes predict different numbers of tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, tiny_models.VOCABULARY, (26, 12), generator=generator)
    lengths = torch.randint(4, 13, (26,), generator=generator)
    return Examples.of_text(rows.masked_fill(torch.arange(12) >= lengths[:, None], PADDING))


def learn(case, work=None, stop=None, steps=SETTINGS.steps):
    """Train the model of a case; its weights, and the history."""
    family, changes = CASES[case]
    settings = replace(SETTINGS, **changes, steps=steps)
    model = tiny_models.build(family).float().requires_grad_(True)
    masks, signal = None, None
    if case == "masks":
        names = [name for name, module in model.named_modules() if name.endswith(("q_proj", "down_proj"))]
        with torch.no_grad():
            for name in names:
                weight = model.get_parameter(f"{name}.weight")
                weight.masked_fill_(weight.abs() < weight.abs().median(), 0.0)
        masks = Masks.of(model, names, lambda weight: weight != 0)
    if case == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name)
    teacher, features = None, ()
    if case in ("teacher", "features", "bf16"):
        teacher = tiny_models.build("smollm", num_hidden_layers=4).float().requires_grad_(False)
        signal = OnlineTeacher(teacher, OBJECTIVES["kl"], 1.0, head_of(teacher))
    if case == "features":  # of a state in the middle: the blocks after it, and the head, get no gradient
        middle = StudentFeatureSettings(features=("hidden",), feature_map="1:2")
        features = make_features(model, teacher, middle, "causal", 0)
    if case == "bf16":
        round_frozen(teacher)
    weight = 0.0 if features else 1.0
    loss = DistillationLoss(signal, 0.7, features, head_of(model), weight)
    held = examples()[:4]
    measured = []

    def held_out(trained):
        if stop is not None and len(measured) == stop:
            raise Stop
        measured.append(float(loss(trained, held)))
        return measured[-1]

    identities = [id(parameter) for parameter in model.parameters()]
    with divided(teacher):
        history = train(model, loss, examples(), settings, work=work, masks=masks, held_out=held_out)
    assert [id(parameter) for parameter in model.parameters()] == identities
    if masks is not None:
        masks.check(model)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, history


def learn_all(out, shard):
    """Every case in this process; the first one keeps the results."""
    os.environ[SHARD] = str(shard).lower()
    assert shards() == shard and blocks_of(tiny_models.build("smollm"))
    for case in CASES:
        weights, history = learn(case, Path(out) / "work" / case)
        if not rank():
            torch.save({"weights": weights, "curve": history.curve}, Path(out) / f"{case}.pt")


def gradients(case):
    """The gradients of the first step, whole, by the parameter's name; None where there is none."""
    found = {}

    class Recording(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for name, p in zip(group["names"], group["params"], strict=True):
                    found[name] = None if p.grad is None else gathered(p.grad).clone()

    def build(model, settings):
        names, parameters = zip(
            *((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True
        )
        return [Recording([{"params": list(parameters), "names": names}], lr=0.1)]

    original, optimizers.build = optimizers.build, build
    try:
        learn(case, steps=1)
    finally:
        optimizers.build = original
    return found


def gradients_of_all(out, shard):
    """Of every case in this process; the first one keeps them."""
    os.environ[SHARD] = str(shard).lower()
    for case in CASES:
        found = gradients(case)
        if not rank():
            torch.save(found, Path(out) / f"{case}.pt")


def start_and_stop(work, shard):
    """A run that dies after its second held-out loss, at step 4: the state of step 2 is there."""
    os.environ[SHARD] = str(shard).lower()
    try:
        learn("tied", Path(work), stop=1)
    except Stop:
        return
    raise AssertionError("it did not stop")


def go_on(work, out, shard):
    """The same run from its state."""
    os.environ[SHARD] = str(shard).lower()
    weights, history = learn("tied", Path(work))
    if not rank():
        torch.save({"weights": weights, "curve": history.curve}, out)
