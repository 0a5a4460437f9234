"""The train walk: learns, resumes to the same bytes, stops early, and says what to try when it diverges."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from torch import nn

from attar import interruption
from attar.data.packing import PADDING, Batches
from attar.errors import NumericsError, SettingsError
from attar.interruption import StoppedError
from attar.models.loading import device
from attar.walks import optimizers
from attar.walks.objectives import next_token
from attar.walks.settings import TrainSettings
from attar.walks.train import train
from tests import tiny_models
from tests.killed import Killed

SETTINGS = TrainSettings(
    steps=12,
    batch_size=2,
    sequence_length=8,
    learning_rate=1e-2,
    checkpoint_every=4,
    evaluate_every=3,
    precision="fp32",
)
ROWS = torch.randint(0, 16, (10, 8), generator=torch.Generator().manual_seed(0))


class Toy(nn.Module):
    """An embedding, a hidden matrix with dropout, a head: one parameter of each kind the optimizers tell
    apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(16, 8)
        self.hidden = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 16, bias=False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens):
        return self.head(self.drop(torch.tanh(self.hidden(self.embedding(tokens)))))


def loss(model, tokens):
    return nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def dying(step):
    calls = 0

    def deadly(model, tokens):
        nonlocal calls
        calls += 1
        if calls > step:
            raise Killed
        return loss(model, tokens)

    return deadly


@pytest.mark.few(3)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("died_at", [2, 5, 8, 11])
def test_a_killed_run_ends_with_the_bytes_of_an_undisturbed_one(tmp_path, optimizer, died_at):
    settings = replace(SETTINGS, optimizer=optimizer)
    whole = Toy()
    history = train(
        whole, loss, ROWS, settings, work=tmp_path / "whole", held_out=lambda m: float(loss(m, ROWS))
    )
    with pytest.raises(Killed):
        train(
            Toy(),
            dying(died_at),
            ROWS,
            settings,
            work=tmp_path / "cut",
            held_out=lambda m: float(loss(m, ROWS)),
        )
    torch.manual_seed(99)  # another process has another generator
    resumed = Toy()
    if died_at > SETTINGS.checkpoint_every:
        nn.init.zeros_(resumed.hidden.weight)  # whatever is there must be replaced by the saved state
    again = train(
        resumed, loss, ROWS, settings, work=tmp_path / "cut", held_out=lambda m: float(loss(m, ROWS))
    )
    for name, value in state(whole).items():
        assert torch.equal(value, state(resumed)[name]), name
    assert again == history


class Stops:
    """A loss that signals its own process in some of its calls."""

    def __init__(self, *calls, number=signal.SIGINT):
        self.calls, self.count, self.number = calls, 0, number

    def __call__(self, model, tokens):
        self.count += 1
        if self.count in self.calls:
            os.kill(os.getpid(), self.number)
        return loss(model, tokens)


@pytest.mark.few(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_stopped_run_ends_its_step_and_goes_on_from_there(tmp_path, optimizer, number, code):
    settings = replace(SETTINGS, optimizer=optimizer, checkpoint_every=50)  # more than there are steps
    undisturbed, model, again = Toy(), Toy(), Toy()
    wanted = train(undisturbed, loss, ROWS, settings, work=tmp_path / "a")
    with pytest.raises(StoppedError) as stopped:
        train(model, Stops(5, number=number), ROWS, settings, work=tmp_path / "b")
    assert stopped.value.exit_code == code
    counting = Stops()
    history = train(again, counting, ROWS, settings, work=tmp_path / "b")
    assert counting.count == settings.steps - 5
    assert history.curve == wanted.curve and history.tokens == wanted.tokens
    assert all(torch.equal(value, undisturbed.state_dict()[name]) for name, value in state(again).items())
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)


def test_a_second_signal_ends_at_once(tmp_path):
    def twice(model, tokens):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one must have ended this step")

    with pytest.raises(KeyboardInterrupt) as ended:
        train(Toy(), twice, ROWS, SETTINGS, work=tmp_path)
    assert not isinstance(ended.value, StoppedError) and list(tmp_path.glob("state-*")) == []


def test_a_state_is_written_by_time_too(tmp_path, monkeypatch):
    monkeypatch.setattr(interruption, "SAVE_S", 0.0)

    def third(model, tokens, calls=[0]):  # noqa: B006
        calls[0] += 1
        if calls[0] == 3:
            raise Killed
        return loss(model, tokens)

    with pytest.raises(Killed):
        train(Toy(), third, ROWS, replace(SETTINGS, checkpoint_every=50), work=tmp_path)
    assert [path.name for path in tmp_path.glob("state-*")] == ["state-00000002"]


def test_learns_and_reports_a_curve(tmp_path):
    model = Toy()
    rows = (torch.arange(10)[:, None] + 3 * torch.arange(8)) % 16  # each token tells the next
    before = float(loss(model, rows).detach())
    history = train(model, loss, rows, replace(SETTINGS, steps=200), held_out=lambda m: float(loss(m, rows)))
    assert float(loss(model.eval(), rows).detach()) < 0.5 * before
    assert history.step == 200 and history.tokens == 200 * 16
    assert [row["step"] for row in history.curve if "held_out" in row][-1] == 200
    assert history.curve[-1]["step"] == 200


def test_accumulation_equals_a_larger_batch():
    plain, added = Toy().eval(), Toy().eval()
    plain.drop.p = added.drop.p = 0.0
    train(plain, loss, ROWS, replace(SETTINGS, batch_size=4, steps=3))
    train(added, loss, ROWS, replace(SETTINGS, batch_size=2, accumulate=2, steps=3))
    for a, b in zip(plain.parameters(), added.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def padded_loss(model, tokens):
    z = model(tokens.clamp(min=0))[:, :-1]
    return nn.functional.cross_entropy(z.flatten(0, 1).float(), tokens[:, 1:].flatten())


@pytest.mark.parametrize("lengths", [(8, 2, 5, 3), (8, 8, 1, 1)])
def test_accumulation_of_uneven_padding_equals_a_larger_batch(lengths):
    """The mean is over all predictions of a step, not over the means of its parts; a part without any adds
    nothing."""
    rows = ROWS[:4].clone()
    for row, length in zip(rows, lengths, strict=True):
        row[length:] = PADDING
    plain, added = Toy().eval(), Toy().eval()
    plain.drop.p = added.drop.p = 0.0
    settings = replace(SETTINGS, steps=1, evaluate_every=0, optimizer="adamw")
    whole = train(plain, padded_loss, rows, replace(settings, batch_size=4))
    parts = train(added, padded_loss, rows, replace(settings, batch_size=2, accumulate=2))
    assert parts.curve[0]["loss"] == pytest.approx(whole.curve[0]["loss"], rel=1e-5)
    for a, b in zip(plain.parameters(), added.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


class Repeated:
    """Every batch is of one token, which the model has drawn itself: its bias at the time."""

    def __init__(self):
        self.seen = []

    def batch(self, number, model):
        self.seen.append((number, model.hidden.bias.detach().clone()))
        return ROWS[number % 10][None]


def test_a_source_makes_batches_with_the_current_weights():
    source, model = Repeated(), Toy()
    train(model, loss, source, replace(SETTINGS, steps=3, accumulate=2, evaluate_every=0))
    assert [number for number, _ in source.seen] == [0, 1, 2, 3, 4, 5]
    assert torch.equal(source.seen[0][1], source.seen[1][1])
    assert not torch.equal(source.seen[1][1], source.seen[2][1])


def test_recomputed_activations_change_no_number():
    """And a model that cannot recompute them says so."""
    model, same = (tiny_models.build("llama3") for _ in range(2))
    rows = tiny_models.tokens(model, batch=4, length=12)
    settings = replace(SETTINGS, steps=2, evaluate_every=0)
    histories = [
        train(one.requires_grad_(True), next_token, rows, replace(settings, gradient_checkpointing=again))
        for one, again in ((model, False), (same, True))
    ]
    assert histories[0].curve == histories[1].curve
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    with pytest.raises(SettingsError, match="Toy cannot"):
        train(Toy(), loss, ROWS, replace(SETTINGS, gradient_checkpointing=True))


def test_stops_early_and_keeps_the_best_weights(tmp_path):
    losses = iter([3.0, 2.0, 2.5, 2.6, 2.7])
    seen = []

    def held_out(model):
        seen.append(model.hidden.weight.detach().clone())
        return next(losses)

    model = Toy()
    settings = replace(SETTINGS, steps=100, evaluate_every=3, patience=2)
    history = train(model, loss, ROWS, settings, work=tmp_path, held_out=held_out)
    assert history.stopped and history.step == 12 and history.best == 2.0
    assert torch.equal(model.hidden.weight, seen[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_divergence_says_what_to_try(bad):
    with pytest.raises(NumericsError, match="step 1") as raised:
        train(Toy(), lambda m, t: loss(m, t) * bad, ROWS, SETTINGS)
    assert "--learning-rate" in raised.value.hint


def test_gradient_overflow_is_found_even_when_the_loss_is_finite():
    class Cliff(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * float("inf")

    with pytest.raises(NumericsError, match="gradient"):
        train(Toy(), lambda m, t: Cliff.apply(loss(m, t)), ROWS, SETTINGS)


def test_bf16_arithmetic_keeps_float32_weights():
    model = Toy()
    seen = []

    def spy(m, tokens):
        seen.append(m(tokens).dtype)
        return loss(m, tokens)

    train(model, spy, ROWS, replace(SETTINGS, precision="bf16", steps=2))
    assert seen[0] == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.few(1)
@pytest.mark.parametrize("began", ["bf16", "fp32"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_goes_on_in_the_precision_it_began_with(tmp_path, monkeypatch, began, optimizer):
    """Begun on one machine and resumed on another: the bytes of the first, and the history names them."""
    settings = replace(SETTINGS, precision="auto", optimizer=optimizer, evaluate_every=0)
    monkeypatch.setattr(device, "has_bfloat16", lambda device: began == "bf16")
    whole = Toy()
    history = train(whole, loss, ROWS, settings, work=tmp_path / "whole")
    assert history.precision == began
    with pytest.raises(Killed):
        train(Toy(), dying(6), ROWS, settings, work=tmp_path / "cut")
    monkeypatch.setattr(device, "has_bfloat16", lambda device: began != "bf16")
    resumed = Toy()
    assert train(resumed, loss, ROWS, settings, work=tmp_path / "cut") == history
    assert all(torch.equal(value, state(whole)[name]) for name, value in state(resumed).items())
    other = Toy()
    assert train(other, loss, ROWS, settings, work=tmp_path / "new").precision != began
    assert not torch.equal(other.hidden.weight, whole.hidden.weight)


def test_held_out_losses_are_measured_in_the_runs_precision():
    seen = []

    def measure(model):
        seen.append(model(ROWS).dtype)
        return 0.0

    for asked in ("bf16", "fp32"):
        train(Toy(), loss, ROWS, replace(SETTINGS, precision=asked, steps=1), held_out=measure)
    assert seen == [torch.bfloat16, torch.float32]


def test_frozen_parameters_stay():
    model = Toy()
    model.embedding.weight.requires_grad_(False)
    before = model.embedding.weight.clone()
    train(model, loss, ROWS, replace(SETTINGS, steps=3))
    assert torch.equal(before, model.embedding.weight)


def test_every_parameter_has_one_optimizer():
    model = Toy()
    for name in ("adamw", "muon"):
        built = optimizers.build(model, replace(SETTINGS, optimizer=name))
        owned = [id(p) for optimizer in built for group in optimizer.param_groups for p in group["params"]]
        assert sorted(owned) == sorted(id(p) for p in model.parameters())
    hidden, matrices, rest = optimizers.split(model)
    assert [p.shape for p in hidden] == [(8, 8)] and len(matrices) == 2 and len(rest) == 1


def test_schedule_warms_up_peaks_and_decays():
    settings = TrainSettings(steps=100, warmup=0.1, min_lr_ratio=0.1, learning_rate=1.0)
    rates = [optimizers.rate(step, settings) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0 and rates[99] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert optimizers.rate(0, TrainSettings(steps=1, warmup=0.0)) == TrainSettings().learning_rate


def test_batches_are_a_function_of_their_number():
    batches = Batches(torch.arange(7)[:, None], 3, seed=1)
    straight = torch.cat([batches[i].flatten() for i in range(14)])
    assert all(sorted(straight[e * 7 : e * 7 + 7].tolist()) == list(range(7)) for e in range(6))
    assert not torch.equal(straight[:7], straight[7:14])
    assert torch.equal(batches[9], Batches(torch.arange(7)[:, None], 3, seed=1)[9])
