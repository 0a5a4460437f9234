"""What the experts of a mixture get from a sweep, against hooks on transformers' own experts."""

import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.models.loading.load import load_model
from attar.quantization.grids import QuantizedTensor
from attar.quantization.hessian import CrossHessian, Hessian
from attar.quantization.layerwise import LayerSolver
from attar.quantization.methods.gptq import gptq
from attar.quantization.plan import plan
from attar.quantization.rounding import METHODS
from attar.quantization.settings import quantize_settings
from attar.walks.expert_inputs import ExpertTokens
from attar.walks.solvers import LinearSolver, Solution
from attar.walks.sweep import SweepOptions, sweep_linears
from tests import tiny_models


class Recorder(LinearSolver):
    """Keeps the Hessian of every group and leaves the weights, or scales them."""

    original = False

    def __init__(self, factor=1.0, kind=Hessian):
        self.seen, self.factor, self.kind, self.original = {}, factor, kind, kind is CrossHessian

    def accumulator(self, names, inputs):
        return self.kind(inputs)

    def solve(self, weights, seen):
        self.seen.update(dict.fromkeys(weights, seen))
        return {n: Solution(w * self.factor, {"weight": w * self.factor}, {}) for n, w in weights.items()}

    def restore(self, name, tensors):
        return tensors["weight"]


def save(folder, family="qwen3_moe", **changes):
    return open_checkpoint(tiny_models.save(tiny_models.build(family, **changes), folder))


def rows(count=3, size=2, length=12):
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(3, 320, (count, size, length), generator=generator))


def experts_inputs(model, tokens):
    """By layer: hidden states (T, H) and chosen experts (T, k) of all batches, of stacked experts."""
    seen = {}
    for number, layer in enumerate(model.model.layers):
        hook = lambda _, args, number=number: seen.setdefault(number, []).append(args)  # noqa: E731
        layer.mlp.experts.register_forward_pre_hook(hook)
    for batch in tokens:
        tiny_models.logits(model, batch)
    return {n: tuple(torch.cat(parts) for parts in zip(*calls, strict=True)) for n, calls in seen.items()}


def slow_hessians(layer, hidden, index, floor=0, everything=False):
    """H of gate (and up) and of down of every expert, by a loop over experts and tokens."""
    experts, found = layer.mlp.experts, []
    for number in range(8):
        own = [t for t in range(len(hidden)) if number in index[t]]
        others = [t for t in range(len(hidden)) if number not in index[t]]
        wanted = len(others) if everything else min(max(floor - len(own), 0), len(others))
        counted = own + [others[i * len(others) // max(wanted, 1)] for i in range(wanted)]
        up, down = torch.zeros(64, 64), torch.zeros(32, 32)
        for t in counted:
            x = hidden[t]
            gate, value = (experts.gate_up_proj[number] @ x).split(32)
            y = torch.nn.functional.silu(gate) * value
            up += torch.outer(x, x)
            down += torch.outer(y, y)
        found.append((up * 2 / len(counted), down * 2 / len(counted), len(own)))
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("waiting", [0, 2**30])
@pytest.mark.parametrize(
    "counted", [ExpertTokens(0), ExpertTokens(0.5), ExpertTokens(0, everything=True)], ids=str
)
@torch.no_grad()
def test_each_experts_hessian_against_a_loop_over_tokens(tmp_path, waiting, counted):
    checkpoint = save(tmp_path / "model", num_hidden_layers=2)
    recorder, tokens = Recorder(), rows()
    result = sweep_linears(
        checkpoint,
        tokens,
        recorder,
        SweepOptions(work=tmp_path / "work", experts=counted, waiting_bytes=waiting, precision="fp32"),
    )
    model = load_model(checkpoint)
    reports = {report["name"]: report for report in result.reports}
    for number, (hidden, index, _) in experts_inputs(model, tokens).items():
        floor = int(counted.floor * 64)
        slow = slow_hessians(model.model.layers[number], hidden, index, floor, counted.everything)
        for expert, (up, down, routed) in enumerate(slow):
            path = f"model.layers.{number}.mlp.experts.{expert}"
            H, H_down = (recorder.seen[f"{path}.{leaf}"].value() for leaf in ("up_proj", "down_proj"))
            torch.testing.assert_close(H, up, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(H_down, down, rtol=1e-4, atol=1e-5)
            assert reports[f"{path}.up_proj"]["routed"] == routed
            assert recorder.seen[f"{path}.up_proj"] is recorder.seen[f"{path}.gate_proj"]


@torch.no_grad()
def test_gptq_of_an_expert_from_the_inputs_behind_its_new_gate_and_up(tmp_path):
    checkpoint, tokens = save(tmp_path / "model", num_hidden_layers=1), rows(8)
    settings = quantize_settings(method="gptq", scheme="W4A16", group_size=32, scales="absmax", refine=0)
    grids = {layer.module: layer.grid for layer in plan(checkpoint, settings.storage).sites.values()}
    assert len(grids) == 4 + 8 * 3
    attention = lambda name: "experts" in name  # noqa: E731  (the router's choice stays the model's)
    solver = LayerSolver(grids, METHODS["gptq"], settings.rounding)
    result = sweep_linears(
        checkpoint,
        tokens,
        solver,
        SweepOptions(work=tmp_path / "work", select=attention, experts=ExpertTokens(0), precision="fp32"),
    )
    codes = result.tensors(0)
    model = load_model(checkpoint)
    hidden, index, _ = experts_inputs(model, tokens)[0]
    for number in (0, 5):
        path = f"model.layers.0.mlp.experts.{number}"
        x = hidden[(index == number).any(-1)]
        gate, up, down = (f"{path}.{leaf}_proj" for leaf in ("gate", "up", "down"))
        dense = [QuantizedTensor.from_tensors(grids[name], codes[name]).dequantize() for name in (gate, up)]
        y = torch.nn.functional.silu(x @ dense[0].T) * (x @ dense[1].T)
        for name, inputs, weight in (
            (up, x, model.model.layers[0].mlp.experts.gate_up_proj[number, 32:]),
            (down, y, model.model.layers[0].mlp.experts.down_proj[number]),
        ):
            H = Hessian(inputs.shape[1])
            H.add(inputs)
            expected = gptq(weight, H.value(), grids[name], damp=0.01, act_order=True).quantized.codes
            same = (codes[name]["codes"] == expected).float().mean()
            assert same > 0.995, name  # 0.63 with another expert's inputs


def test_the_original_inputs_are_those_of_the_same_tokens(tmp_path):
    """The second block's router sees other hidden states than the original model's; the tokens are paired."""
    checkpoint, tokens = save(tmp_path / "model", num_hidden_layers=2), rows()
    recorder = Recorder(0.9, CrossHessian)
    sweep_linears(
        checkpoint,
        tokens,
        recorder,
        SweepOptions(work=tmp_path / "work", experts=ExpertTokens(0), precision="fp32"),
    )
    changed = load_model(checkpoint)
    original = experts_inputs(load_model(checkpoint), tokens)[1][0]
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if "layers.0" in name and "norm" not in name and "mlp.gate." not in name:
                parameter.mul_(0.9)
            if "layers.1.self_attn" in name and "norm" not in name:
                parameter.mul_(0.9)
    hidden, index, _ = experts_inputs(changed, tokens)[1]
    for number in range(8):
        chosen = (index == number).any(-1)
        seen = recorder.seen[f"model.layers.1.mlp.experts.{number}.up_proj"]
        assert seen.tokens == int(chosen.sum())
        C = 2 / max(seen.tokens, 1) * original[chosen].T @ hidden[chosen]
        torch.testing.assert_close(seen.cross(), C, rtol=3e-2, atol=3e-2)


@pytest.mark.few(1)
@pytest.mark.parametrize("limit", [0, 2**30])
def test_a_killed_sweep_and_spilled_inputs_give_the_same_bytes(tmp_path, monkeypatch, limit):
    checkpoint, tokens = save(tmp_path / "model", "mixtral"), rows()
    whole = sweep_linears(checkpoint, tokens, Recorder(0.9), SweepOptions(work=tmp_path / "whole"))
    killed = Recorder(0.9)

    def die(weights, seen):
        if "model.layers.1.mlp.experts.3.w2" in weights:
            raise KeyboardInterrupt
        return Recorder.solve(killed, weights, seen)

    monkeypatch.setattr(killed, "solve", die)
    with pytest.raises(KeyboardInterrupt):
        sweep_linears(checkpoint, tokens, killed, SweepOptions(work=tmp_path / "killed", spill_bytes=limit))
    resumed = sweep_linears(
        checkpoint, tokens, Recorder(0.9), SweepOptions(work=tmp_path / "killed", spill_bytes=limit)
    )
    for ours, theirs in zip(resumed.files, whole.files, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    left = [sorted(path.name for path in (tmp_path / run).iterdir()) for run in ("killed", "whole")]
    assert left[0] == left[1]


def test_the_router_chooses_with_its_stored_correction(tmp_path):
    """DeepSeek's is a buffer, not a parameter."""
    model = tiny_models.build("deepseek_v3", num_hidden_layers=2)
    correction = model.model.layers[1].mlp.gate.e_score_correction_bias
    correction.copy_(torch.linspace(-1, 1, 8))
    checkpoint = open_checkpoint(tiny_models.save(model, tmp_path / "model"))
    result = sweep_linears(
        checkpoint, rows(), Recorder(), SweepOptions(work=tmp_path / "work", precision="fp32")
    )
    chosen = []
    model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    for batch in rows():
        tiny_models.logits(model, batch)
    counts = torch.cat(chosen).flatten().bincount(minlength=8).tolist()
    routed = {report["name"]: report["routed"] for report in result.reports if "routed" in report}
    assert [routed[f"model.layers.1.mlp.experts.{number}.up_proj"] for number in range(8)] == counts
    assert counts[7] > 2 * counts[0]
