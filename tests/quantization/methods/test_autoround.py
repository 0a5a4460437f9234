"""Learned rounding: gradients against a slow formula, block errors against round to nearest, codes that are
the weight."""

import os
import signal

import pytest
import torch
from torch import nn

from attar.checkpoint import open_checkpoint
from attar.errors import SettingsError
from attar.interruption import StateFile, StoppedError, interruptible
from attar.models.anatomy.discover import discover
from attar.quantization.blockwise import AutoRoundSolver, solved_start
from attar.quantization.grids import IntGrid, TileParameters
from attar.quantization.grids.float8 import Float8Grid
from attar.quantization.grids.fp4 import MXFP4Grid, NVFP4Grid
from attar.quantization.grids.ggml import GGMLGrid
from attar.quantization.grids.nf4 import NF4Grid
from attar.quantization.hessian import Hessian
from attar.quantization.methods.autoround import LearnedRounding, autoround, squared_error
from attar.quantization.methods.gptq import gptq
from attar.quantization.methods.rtn import rtn
from attar.walks.positions import PositionWeights
from attar.walks.solvers import BlockView, LinearSolver, Solution
from attar.walks.sweep import SweepOptions, sweep_blocks
from tests import tiny_models


class GPTQ(LinearSolver):
    """What an AutoRound may start from."""

    def __init__(self, grid):
        self.grid = grid

    def accumulator(self, names, inputs):
        return Hessian(inputs)

    def solve(self, weights, hessian):
        codes = {name: gptq(weight, hessian.value(), self.grid).quantized for name, weight in weights.items()}
        return {name: Solution(rounded.dequantize(), rounded.tensors()) for name, rounded in codes.items()}

    def restore(self, name, tensors):
        raise AssertionError("nothing is read back")


GRIDS = {
    "int3": IntGrid(3, 16),
    "int2 with zeros": IntGrid(2, 16, symmetric=False),
    "int3 bf16": IntGrid(3, 16, storage=torch.bfloat16),
    "int4 block": IntGrid(4, 32, rows=8),
    "fp8": Float8Grid(group_size=0),
    "nf4": NF4Grid(16),
    "nf4 double": NF4Grid(16, double=True),
    "nvfp4": NVFP4Grid(),
    "mxfp4": MXFP4Grid(),
    "Q4_0": GGMLGrid("Q4_0"),
    "Q4_1": GGMLGrid("Q4_1"),
}


class View:
    """One block of a tiny model with its real calls; batches of two sequences, and one of a single one."""

    state = StateFile()

    def __init__(self, family, batches=5):
        model = tiny_models.build(family)
        model.requires_grad_(False)
        block = discover(model).blocks[1]
        self.module, self.names = block.module, list(block.linears)
        self.modules = {name: model.get_submodule(name) for name in self.names}
        self.seen = []

        def hook(_, args, kwargs, output):
            out = output if torch.is_tensor(output) else output[0]
            self.seen.append((args[0].detach(), args[1:], kwargs, out.detach()))

        handle = self.module.register_forward_hook(hook, with_kwargs=True)
        for number in range(batches):
            size = 1 if number == batches - 1 else 2
            with torch.no_grad():
                model(
                    input_ids=tiny_models.tokens(model, batch=size, length=16, seed=number), use_cache=False
                )
        handle.remove()
        self.count = len(self.seen)

    def inputs(self, number):
        return self.seen[number][0]

    def targets(self, number):
        return self.seen[number][3]

    def importance(self, hidden, name=""):
        return None

    def __call__(self, hidden, number):
        _, args, kwargs, _ = self.seen[number]
        output = self.module(hidden, *args, **kwargs)
        return output if torch.is_tensor(output) else output[0]

    def error(self, weights):
        """Mean squared error of the block's output over all batches with other weights, in float64 sums."""
        kept = {name: module.weight for name, module in self.modules.items()}
        for name, weight in weights.items():
            linear = isinstance(self.modules[name], nn.Linear)
            self.modules[name].weight = nn.Parameter(weight if linear else weight.T, requires_grad=False)
        with torch.no_grad():
            parts = [(self(x, n) - y).double() for n, (x, _, _, y) in enumerate(self.seen)]
        for name, weight in kept.items():
            self.modules[name].weight = weight
        return float(sum(p.square().sum() for p in parts) / sum(p.numel() for p in parts))

    def weight(self, name):
        module = self.modules[name]
        return module.weight if isinstance(module, nn.Linear) else module.weight.T


@pytest.fixture(scope="module")
def llama():
    return View("llama3")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", GRIDS)
def test_beats_nearest_on_every_grid_and_its_codes_are_its_weight(llama, name):
    grid = GRIDS[name]
    learned = autoround(llama, dict.fromkeys(llama.names, grid), iterations=30, batch=4)
    nearest = llama.error({n: rtn(llama.weight(n), grid).dequantize() for n in llama.names})
    assert learned.first == pytest.approx(nearest, rel=1e-4)
    dense = {n: result.dequantize() for n, result in learned.quantized.items()}
    assert llama.error(dense) == pytest.approx(learned.best, rel=1e-4)
    assert learned.best < 0.9 * nearest


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gpt2", "phi3"])
def test_runs_on_transposed_and_fused_modules(family):
    view = View(family)
    before = {name: module.weight for name, module in view.modules.items()}
    grid = IntGrid(3, 16)
    learned = autoround(view, dict.fromkeys(view.names, grid), iterations=30, batch=4)
    assert learned.best < 0.9 * view.error({n: rtn(view.weight(n), grid).dequantize() for n in view.names})
    assert all(view.modules[name].weight is weight for name, weight in before.items())


@pytest.mark.few(1)
@pytest.mark.parametrize("hold", [0, 2**30])
def test_same_seed_same_bytes(llama, hold):
    grids = dict.fromkeys(llama.names, IntGrid(3, 16, symmetric=False))
    first, again, other = (
        autoround(llama, grids, iterations=20, batch=2, seed=seed, hold=hold).quantized for seed in (1, 1, 2)
    )
    for name in llama.names:
        assert torch.equal(first[name].codes, again[name].codes)
        assert torch.equal(first[name].parameters.scale, again[name].parameters.scale)
    assert any(not torch.equal(first[name].codes, other[name].codes) for name in llama.names)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "grid", [IntGrid(3, 16), IntGrid(3, 16, symmetric=False), NF4Grid(16), NVFP4Grid(), GGMLGrid("Q4_1")]
)
def test_given_codes_are_where_it_starts(llama, grid):
    """The first rounding of a start is the start's, however far its codes are from the nearest ones."""
    starts = solved_start(GPTQ(grid))(llama, dict.fromkeys(llama.names, grid))
    assert list(starts) == llama.names
    learned = autoround(llama, dict.fromkeys(llama.names, grid), iterations=1, batch=2, starts=starts)
    given = llama.error({name: result.dequantize() for name, result in starts.items()})
    assert learned.first == pytest.approx(given, rel=1e-4)
    for name, result in starts.items():
        rounding = LearnedRounding(llama.weight(name), grid, start=result)
        assert torch.equal(rounding.quantized().dequantize(), result.dequantize())
        assert torch.equal(rounding().detach(), result.dequantize())


def test_a_start_far_from_the_weight_is_kept_too():
    grid, g = IntGrid(4, 8), torch.Generator().manual_seed(0)
    weight = torch.randn(4, 16, generator=g)
    start = rtn(weight, grid)
    codes = torch.randint(-8, 8, weight.shape, generator=g)
    far = type(start)(grid, codes.to(torch.int8), start.parameters)
    assert torch.equal(LearnedRounding(weight, grid, start=far).quantized().codes, codes.to(torch.int8))


def test_masked_weights_stay_zero(llama):
    masks = {name: llama.weight(name).abs() > 0.05 for name in llama.names}
    kept = {name: llama.modules[name].weight for name in llama.names}
    for name in llama.names:
        llama.modules[name].weight = nn.Parameter(kept[name] * masks[name], requires_grad=False)
    try:
        for grid in (IntGrid(3, 16), IntGrid(3, 16, symmetric=False), NF4Grid(16)):
            grids = dict.fromkeys(llama.names, grid)
            result = autoround(llama, grids, iterations=4, masks=masks).quantized
            assert all((result[name].dequantize()[~masks[name]] == 0).all() for name in llama.names)
    finally:
        for name in llama.names:
            llama.modules[name].weight = kept[name]


def slow(w, s, z, V, levels, h, upstream):
    """One weight, eq. 2 to 5 written out: its value, and d(upstream * value) / d(V, s, z)."""
    v = w / s + z + V * h
    level = min(levels, key=lambda one: abs(one - v))
    value = s * (level - z)
    inside = min(levels) <= v <= max(levels)
    dV = upstream * s * h * inside
    ds = upstream * ((level - z) + s * (-w / s**2) * inside)
    dz = upstream * (-s + s * inside)
    return value, dV, ds, dz


@pytest.mark.parametrize("seed", range(4))
def test_gradients_against_a_slow_formula(seed):
    """A 2-bit grid with a zero, one tile, some weights beyond its ends; autograd supplies alpha and beta."""
    g = torch.Generator().manual_seed(seed)
    grid = IntGrid(2, 4, symmetric=False)
    weight = torch.randn(1, 4, generator=g)
    rounding = LearnedRounding(weight, grid)
    V = torch.rand(1, 4, generator=g) - 0.5
    rounding.learned[0].data.copy_(V.view(1, 1, 1, 4))
    rounding.learned[1].data.fill_(0.7)
    rounding.learned[2].data.fill_(0.8)
    upstream = torch.randn(1, 4, generator=g)
    rounded = rounding()
    dV, dalpha, dbeta = torch.autograd.grad(rounded, rounding.learned, upstream)
    s, z = (float(value.detach()) for value in (rounding.parameters().scale, rounding.parameters().zero))
    rows = [
        slow(float(weight[0, k]), s, z, float(V[0, k]), (-2, -1, 0, 1), 1.0, float(upstream[0, k]))
        for k in range(4)
    ]
    assert rounded.detach()[0].tolist() == pytest.approx([row[0] for row in rows], abs=1e-6)
    assert dV.flatten().tolist() == pytest.approx([row[1] for row in rows], abs=1e-5)
    s0, z0 = (float(value) for value in (rounding.base.scale, rounding.base.zero))
    ds, dz = sum(row[2] for row in rows), sum(row[3] for row in rows)
    top, bottom = s0 * (1 - z0), s0 * (-2 - z0)  # s = (alpha top - beta bottom) / 3, z = -2 - beta bottom / s
    through_s = ds + dz * 0.8 * bottom / s**2
    assert float(dalpha) == pytest.approx(through_s * top / 3, rel=1e-4, abs=1e-5)
    assert float(dbeta) == pytest.approx(-through_s * bottom / 3 - dz * bottom / s, rel=1e-4, abs=1e-5)


def test_offsets_of_uneven_levels_are_in_units_of_the_gap_around_a_weight():
    """NF4: half a gap moves a weight from anywhere between two levels to the one or the other."""
    grid = NF4Grid(8)
    weight = torch.tensor([[1.0, 0.9, 0.75, 0.02, -0.05, -0.3, -0.65, -0.99]])
    table = sorted(grid.level(torch.arange(16)).tolist())
    for V in (0.499, -0.499):
        rounding = LearnedRounding(weight, grid)
        rounding.learned[0].data.fill_(V)
        for value, got in zip(weight[0].tolist()[1:], rounding().detach()[0].tolist()[1:], strict=True):
            below = max(level for level in table if level <= value)
            above = min(level for level in table if level >= value)
            assert got >= above - 1e-6 if V > 0 else got <= below + 1e-6, (V, value)
            assert below - 0.17 < got < above + 0.28


def test_finds_the_rounding_that_brute_force_finds():
    """Three weights whose inputs always agree: only the sum of the weights counts."""

    class Sum:
        state = StateFile()

        def __init__(self):
            self.linear = nn.Linear(4, 1, bias=False)
            self.linear.weight = nn.Parameter(torch.tensor([[0.3, 0.4, 0.44, 7.0]]), requires_grad=False)
            self.names, self.modules, self.count = ["sum"], {"sum": self.linear}, 1
            self.x = torch.randn(2, 8, 1, generator=torch.Generator().manual_seed(0)).expand(2, 8, 4)

        def inputs(self, number):
            return self.x

        def targets(self, number):
            return self.x[..., :1] * 7.9

        def importance(self, hidden, name=""):
            return None

        def __call__(self, hidden, number):
            return self.linear(hidden)

    grid = IntGrid(4, 4, symmetric=False)
    view = Sum()
    nearest = rtn(view.linear.weight, grid)
    learned = autoround(view, {"sum": grid}, iterations=50, clip=False)
    s = float(nearest.parameters.scale)
    best = min((k * s - 7.9) ** 2 for k in range(-8, 40))
    reached = (float(learned.quantized["sum"].dequantize().sum()) - 7.9) ** 2
    assert reached == pytest.approx(best, abs=1e-5) and (float(nearest.dequantize().sum()) - 7.9) ** 2 > best


@pytest.mark.parametrize("seed", range(2))
def test_adam_steps_are_torch_s(seed):
    g = torch.Generator().manual_seed(seed)
    rounding = LearnedRounding(torch.randn(4, 16, generator=g), IntGrid(3, 8), clip=False, update="adam")
    twin = torch.zeros(4, 16, requires_grad=True)
    peer = torch.optim.Adam([twin], lr=0.01, betas=(0.9, 0.99), eps=1e-12)
    for _ in range(5):
        upstream = torch.randn(4, 16, generator=g)
        rounded = rounding()
        (slope,) = torch.autograd.grad(rounded, rounding.learned, upstream, retain_graph=True)
        rounding.step(rounded, upstream, 0.01)
        twin.grad = slope.reshape(4, 16)
        peer.step()
    assert torch.allclose(rounding.learned[0].detach().reshape(4, 16), twin.detach(), atol=1e-6)


def test_adam_beats_nearest_too(llama):
    grids = dict.fromkeys(llama.names, IntGrid(3, 16))
    learned = autoround(llama, grids, iterations=30, batch=4, update="adam")
    assert learned.best < 0.9 * learned.first


def test_refuses_what_it_cannot_do(llama):
    grids = dict.fromkeys(llama.names, IntGrid(3, 16))
    with pytest.raises(SettingsError, match="update"):
        autoround(llama, grids, update="newton")
    with pytest.raises(SettingsError, match="iterations"):
        autoround(llama, grids, iterations=0)
    start = rtn(llama.weight(llama.names[0]), IntGrid(3, 16))
    ordered = type(start)(start.grid, start.codes, start.parameters, torch.zeros(64, dtype=torch.int64))
    with pytest.raises(SettingsError, match="act_order"):
        autoround(llama, grids, iterations=1, starts={llama.names[0]: ordered})


@pytest.mark.slow
def test_the_sweep_takes_it_block_by_block(tmp_path):
    checkpoint = open_checkpoint(tiny_models.save(tiny_models.build("qwen2"), tmp_path / "model"))
    grid = IntGrid(3, 16)
    names = [name for block in discover(tiny_models.build("qwen2")).blocks for name in block.linears]
    start = solved_start(GPTQ(grid))
    solver = AutoRoundSolver(
        dict.fromkeys(names, grid), iterations=10, batch=4, precision="fp32", start=start
    )
    g = torch.Generator().manual_seed(0)
    batches = [torch.randint(5, 250, (2, 12), generator=g) for _ in range(4)]
    swept = sweep_blocks(checkpoint, batches, solver, SweepOptions(work=tmp_path / "work", precision="fp32"))
    assert [report["name"] for report in swept.reports] == names
    assert all(report["loss_best"] <= report["loss_first"] for report in swept.reports)
    stored = swept.tensors(1)
    for name, tensors in stored.items():
        weight = solver.restore(name, tensors)
        assert weight.unique().numel() > 8 and tensors["codes"].dtype == torch.int8
    again = sweep_blocks(checkpoint, batches, solver, SweepOptions(work=tmp_path / "again", precision="fp32"))
    for name, tensors in stored.items():
        assert torch.equal(tensors["codes"], again.tensors(1)[name]["codes"])


def test_inputs_are_not_modified(llama):
    weight = llama.weight(llama.names[0])
    before = weight.clone()
    start = rtn(weight, IntGrid(3, 16))
    codes = start.codes.clone()
    rounding = LearnedRounding(weight, IntGrid(3, 16), start=start)
    rounded = rounding()
    rounding.step(rounded, torch.ones_like(rounded), 0.3)
    assert torch.equal(weight, before) and torch.equal(start.codes, codes)
    assert isinstance(rounding.quantized().parameters, TileParameters)


@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["sign", "adam"])
def test_a_stopped_block_goes_on_from_its_step(llama, tmp_path, update):
    grids = dict.fromkeys(llama.names, IntGrid(4, group_size=16))
    options = {"iterations": 8, "batch": 2, "update": update}
    wanted = autoround(llama, grids, **options)

    class Stops(StateFile):
        done = 0

        def step(self, state):
            Stops.done += 1
            if Stops.done == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            super().step(state)

    try:
        with interruptible() as stop, pytest.raises(StoppedError):
            llama.state = Stops(tmp_path / "learning.pt", stop)
            autoround(llama, grids, **options)
        llama.state = Stops(tmp_path / "learning.pt")
        learned = autoround(llama, grids, **options)
    finally:
        llama.state = StateFile()
    assert Stops.done == 8
    assert (learned.first, learned.best) == (wanted.first, wanted.best)
    for name, codes in learned.quantized.items():
        assert torch.equal(codes.codes, wanted.quantized[name].codes)
        assert torch.equal(codes.parameters.scale, wanted.quantized[name].parameters.scale)


def test_a_token_of_importance_three_counts_as_three_in_the_loss():
    output, target = (torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    importance = torch.ones(2, 5)
    importance[:, :2] = 3.0
    more = torch.tensor([0, 0, 0, 1, 1, 1, 2, 3, 4])
    repeated = (output[:, more] - target[:, more]).square().mean()
    torch.testing.assert_close(squared_error(output, target, importance), repeated)
    assert squared_error(output, target, None) == (output - target).square().mean()


def test_tokens_count_as_they_do_at_the_last_linear_or_at_a_named_one():
    measured = {"up": torch.tensor([3.0, 1.0, 0.5]), "down": torch.tensor([2.0, 1.0, 1.0])}
    modules = {name: nn.Linear(4, 4) for name in measured}
    weights = PositionWeights(8.0, measured)
    view = BlockView(nn.Identity(), modules, [], [], torch.device("cpu"), torch.add, positions=weights)
    hidden = torch.zeros(2, 3, 4)
    assert view.importance(hidden)[1].tolist() == measured["down"].tolist()
    assert view.importance(hidden, "up")[1].tolist() == measured["up"].tolist()
