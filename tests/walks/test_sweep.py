"""The sweep walk against a plain forward pass with everything in memory."""

import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.errors import ModelError
from attar.models.anatomy.parts import weight_of
from attar.models.loading import device
from attar.models.loading.load import load_model
from attar.models.surgery.cut_model import keep_layers
from attar.quantization.hessian import CrossHessian, Hessian
from attar.walks.expert_inputs import ExpertTokens
from attar.walks.offloaded_model import OffloadedModel
from attar.walks.positions import FIRST, PositionWeights
from attar.walks.solvers import LinearSolver, Solution
from attar.walks.sweep import SweepOptions, sweep_blocks, sweep_linears
from benchmarks import memory
from tests import tiny_models
from tests.cases import mostly_slow


def save_family(family, folder, **changes):
    return tiny_models.save(tiny_models.build(family, **changes), folder)


class Recorder(LinearSolver):
    """A solver that keeps each layer's Hessian and changes nothing."""

    def __init__(self, change=0.0):
        self.seen, self.change, self.accumulators = {}, change, 0

    def accumulator(self, names, inputs):
        self.accumulators += 1
        return Hessian(inputs)

    def solve(self, weights, seen):
        solved = {}
        for name, weight in weights.items():
            self.seen[name] = seen.value()
            new = weight * (1 + self.change)
            solved[name] = Solution(new, {"weight": new}, {"error": 0.5})
        return solved

    def restore(self, name, tensors):
        return tensors["weight"]


def batches(vocabulary, count=3, size=2, length=12):
    g = torch.Generator().manual_seed(1)
    return [torch.randint(5, vocabulary - 1, (size, length), generator=g) for _ in range(count)]


def hessians_by_hooks(model, names, tokens):
    """The Hessians of a whole model run in one piece."""
    actual = {
        name: Hessian(
            (m := model.get_submodule(name)).weight.shape[1 if isinstance(m, torch.nn.Linear) else 0]
        )
        for name in names
    }
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: actual[name].add(args[0])
        )
        for name in names
    ]
    with torch.no_grad():
        for batch in tokens:
            model(input_ids=batch)
    for hook in hooks:
        hook.remove()
    return {name: h.value() for name, h in actual.items()}


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_sees_what_a_whole_forward_pass_sees(tmp_path, family):
    checkpoint = open_checkpoint(save_family(family, tmp_path / "model"))
    model = load_model(checkpoint, dtype=torch.float32)
    tokens = batches(min(model.get_input_embeddings().num_embeddings, 250))
    recorder = Recorder()
    swept = sweep_linears(
        checkpoint, tokens, recorder, SweepOptions(work=tmp_path / "work", precision="fp32")
    )
    wanted = hessians_by_hooks(model, list(recorder.seen), tokens)
    assert len(swept.reports) == len(recorder.seen) == len(swept.block_of) > 0
    for name, H in wanted.items():
        assert torch.allclose(H, recorder.seen[name], rtol=1e-3, atol=1e-4 * H.abs().max()), name


@pytest.mark.parametrize("family", ["llama3", "mixtral", "bert"])
def test_the_first_tokens_of_a_row_count_more_where_later_ones_read_them(tmp_path, family):
    """The Hessian is that of rows whose first tokens come three times; an expert has its own of them; an
    encoder's rows have no first token."""
    checkpoint = open_checkpoint(save_family(family, tmp_path / "model"))
    tokens, seen = batches(250, length=FIRST + 4), []
    for first in (1.0, 3.0):
        recorder = Recorder()
        options = SweepOptions(
            work=tmp_path / f"work-{first}",
            precision="fp32",
            positions=PositionWeights(first),
            experts=ExpertTokens(floor=0.0),
        )
        sweep_linears(checkpoint, tokens, recorder, options)
        seen.append(recorder.seen)
    rows = tmp_path / "short"
    alone = Recorder()  # a causal model's first tokens are the same without those after them
    sweep_linears(
        checkpoint,
        [batch[:, :FIRST] for batch in tokens],
        alone,
        SweepOptions(work=rows, precision="fp32", experts=ExpertTokens(floor=0.0)),
    )
    block = next(name for name in seen[0] if name.endswith(("q_proj", "query")))
    even, weighed, short = seen[0][block], seen[1][block], alone.seen[block]
    if family == "bert":
        torch.testing.assert_close(weighed, even, rtol=0, atol=0)
        return
    n, m = FIRST + 4, FIRST
    torch.testing.assert_close(weighed * (n + 2 * m), even * n + 2 * m * short, rtol=1e-3, atol=1e-4)
    inner = [name for name in seen[0] if ".experts." in name]
    assert bool(inner) == (family == "mixtral")
    for name in inner:
        assert torch.isfinite(seen[1][name]).all()
    assert not inner or any(not torch.allclose(seen[0][name], seen[1][name]) for name in inner)


def test_linears_of_one_input_have_their_own_sums_where_positions_count_otherwise(tmp_path):
    """q has its own weights, k and v nearly the same ones and therefore one Hessian, of their mean."""
    checkpoint = open_checkpoint(save_family("llama3", tmp_path / "model"))
    tokens, length = batches(250, length=12), 12
    early, late = torch.ones(length), torch.ones(length)
    early[:2], late[6:] = 4.0, 3.0
    attention = "model.layers.0.self_attn"
    weights = {"q_proj": late, "k_proj": early, "v_proj": early * 1.2}
    measured = {f"{attention}.{name}": weight / weight.mean() for name, weight in weights.items()}
    seen = []
    for positions in (PositionWeights(), PositionWeights(measured=measured)):
        recorder = Recorder()
        options = SweepOptions(work=tmp_path / f"{len(seen)}", precision="fp32", positions=positions)
        sweep_linears(checkpoint, tokens, recorder, options)
        seen.append(recorder.seen)
    plain, weighed = seen
    model, inputs = load_model(checkpoint, dtype=torch.float32), []
    model.get_submodule(attention).q_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        model(input_ids=torch.cat(tokens))
    rows = inputs[0]
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = measured[f"{attention}.{name}"]
        wanted = 2 * torch.einsum("s,bsi,bsj->ij", weight, rows, rows) / (len(rows) * length)
        torch.testing.assert_close(weighed[f"{attention}.{name}"], wanted, rtol=1e-3, atol=1e-4)
    assert torch.equal(weighed[f"{attention}.k_proj"], weighed[f"{attention}.v_proj"])
    assert torch.equal(plain["model.layers.0.mlp.up_proj"], weighed["model.layers.0.mlp.up_proj"])


@pytest.mark.parametrize("waiting", [0, 2**30])
def test_later_layers_see_the_new_weights_of_earlier_ones(tmp_path, waiting):
    """True sequential: after a change, every Hessian is that of the changed model up to there."""
    checkpoint = open_checkpoint(save_family("llama3", tmp_path / "model"))
    model = load_model(checkpoint, dtype=torch.float32)
    tokens = batches(250)
    recorder = Recorder(change=0.3)
    sweep_linears(
        checkpoint,
        tokens,
        recorder,
        SweepOptions(work=tmp_path / "work", precision="fp32", waiting_bytes=waiting),
    )
    with torch.no_grad():
        for name in recorder.seen:
            model.get_submodule(name).weight.mul_(1.3)
    wanted = hessians_by_hooks(model, list(recorder.seen), tokens)
    for name, H in wanted.items():
        assert torch.allclose(H, recorder.seen[name], rtol=1e-3, atol=1e-4 * H.abs().max()), name


def test_layers_with_one_input_share_an_accumulator(tmp_path):
    checkpoint = open_checkpoint(save_family("llama3", tmp_path / "model"))
    recorder = Recorder()
    swept = sweep_linears(checkpoint, batches(250), recorder, SweepOptions(work=tmp_path / "work"))
    assert recorder.accumulators == 4 * len(swept.files)  # qkv, o, gate and up, down


@pytest.mark.parametrize("resumed", [False, True])
def test_hidden_states_pass_a_skipped_block_but_the_original_models_do_not(tmp_path, resumed):
    checkpoint = open_checkpoint(save_family("llama3", tmp_path / "model"))
    model, tokens, last = load_model(checkpoint, dtype=torch.float32), batches(250), []

    class Comparing(Recorder):
        original = True

        def accumulator(self, names, inputs):
            return CrossHessian(inputs)

        def solve(self, weights, seen):
            self.seen.update({name: seen.cross() - seen.value() for name in weights})
            return {name: Solution(weight, {"weight": weight}) for name, weight in weights.items()}

    for _ in range(1 + resumed):
        comparing = Comparing()
        sweep_linears(
            checkpoint,
            tokens,
            comparing,
            SweepOptions(
                work=tmp_path / "work",
                skip=[1],
                precision="fp32",
                after_blocks=lambda offloaded, batches, hidden, _: last.append(hidden[0]),
            ),
        )
        if not resumed:
            differs = {name: float(change.abs().max()) > 1e-3 for name, change in comparing.seen.items()}
            assert not any("layers.1." in name for name in differs)
            assert all(wrong == ("layers.2." in name) for name, wrong in differs.items())
    short = keep_layers(model, [0, 2])
    wanted = []
    short.model.norm.register_forward_pre_hook(lambda _, args: wanted.append(args[0]))
    with torch.no_grad():
        short(input_ids=tokens[0])
    assert torch.allclose(last[-1], wanted[0], atol=1e-4)


@pytest.mark.parametrize("died_in", [0, 1])
@pytest.mark.parametrize("began", ["bf16", "fp32"])
def test_a_killed_sweep_goes_on_at_its_block(tmp_path, monkeypatch, died_in, began):
    """In the precision it began with, whatever the machine then has."""
    checkpoint = open_checkpoint(save_family("llama3", tmp_path / "model"))
    tokens = batches(250)
    monkeypatch.setattr(device, "has_bfloat16", lambda device: began == "bf16")
    whole = sweep_linears(checkpoint, tokens, Recorder(0.1), SweepOptions(work=tmp_path / "whole"))
    assert whole.precision == began

    class Dying(Recorder):
        def solve(self, weights, seen):
            if any(f"layers.{died_in}.mlp" in name for name in weights):
                raise KeyboardInterrupt
            return super().solve(weights, seen)

    with pytest.raises(KeyboardInterrupt):
        sweep_linears(checkpoint, tokens, Dying(0.1), SweepOptions(work=tmp_path / "cut"))
    monkeypatch.setattr(device, "has_bfloat16", lambda device: began != "bf16")
    again = Recorder(0.1)
    resumed = sweep_linears(checkpoint, tokens, again, SweepOptions(work=tmp_path / "cut"))
    assert not any(f"layers.{number}." in name for name in again.seen for number in range(died_in))
    assert resumed.reports == whole.reports
    for ours, theirs in zip(resumed.files, whole.files, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.few(5)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.parametrize("precision", mostly_slow(["fp32", "bf16"], ["bf16"]))
def test_waiting_passes_and_repeated_ones_give_the_same_bytes(tmp_path, family, precision):
    checkpoint = open_checkpoint(save_family(family, tmp_path / "model"))
    tokens = batches(250)
    waited, repeated = (
        sweep_linears(
            checkpoint,
            tokens,
            Recorder(0.1),
            SweepOptions(work=tmp_path / str(limit), waiting_bytes=limit, precision=precision),
        )
        for limit in (2**30, 0)
    )
    for ours, theirs in zip(waited.files, repeated.files, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


class Pairs:
    """An accumulator that keeps both streams' inputs."""

    def __init__(self):
        self.x, self.original = [], []

    def add(self, x, original):
        self.x.append(x.clone())
        self.original.append(original.clone())


@pytest.mark.parametrize("waiting", [0, 2**30])
def test_two_streams_see_the_quantized_and_the_original_model(tmp_path, waiting):
    checkpoint = open_checkpoint(save_family("llama3", tmp_path / "model"))
    tokens = batches(250)

    class Both(Recorder):
        original = True

        def accumulator(self, names, inputs):
            return Pairs()

        def solve(self, weights, seen):
            solved = {}
            for name, weight in weights.items():
                self.seen[name] = (torch.cat(seen.x), torch.cat(seen.original))
                solved[name] = Solution(weight * 1.1, {"weight": weight * 1.1}, {})
            return solved

    recorder = Both()
    sweep_linears(
        checkpoint,
        tokens,
        recorder,
        SweepOptions(work=tmp_path / "w", precision="fp32", waiting_bytes=waiting),
    )
    model = load_model(checkpoint, dtype=torch.float32)
    originals = inputs_by_hooks(model, list(recorder.seen), tokens)
    with torch.no_grad():
        for name in recorder.seen:
            model.get_submodule(name).weight.mul_(1.1)
    changed = inputs_by_hooks(model, list(recorder.seen), tokens)
    for name, (x, original) in recorder.seen.items():
        assert torch.allclose(x, changed[name], rtol=1e-3, atol=1e-4), name
        assert torch.allclose(original, originals[name], rtol=1e-3, atol=1e-4), name


def inputs_by_hooks(model, names, tokens):
    """The inputs of some Linears in a whole model run in one piece."""
    actual = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: actual[name].append(args[0])
        )
        for name in names
    ]
    with torch.no_grad():
        for batch in tokens:
            model(input_ids=batch)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in actual.items()}


class WholeBlock:
    """A block solver that shrinks every weight and notes what it was shown."""

    def __init__(self):
        self.shown = []

    def solve_block(self, view):
        outputs = [view(view.inputs(number), number) for number in range(view.count)]
        self.shown.append((outputs, [view.targets(number) for number in range(view.count)]))
        return {
            name: Solution(weight_of(module) * 0.9, {"weight": weight_of(module) * 0.9}, {})
            for name, module in view.modules.items()
        }

    def restore(self, name, tensors):
        return tensors["weight"]


def test_a_block_solver_gets_inputs_behind_the_new_prefix_and_the_original_outputs(tmp_path):
    checkpoint = open_checkpoint(save_family("qwen2", tmp_path / "model"))
    tokens = batches(250)
    solver = WholeBlock()
    swept = sweep_blocks(checkpoint, tokens, solver, SweepOptions(work=tmp_path / "w", precision="fp32"))
    outputs, targets = solver.shown[0]
    for ours, theirs in zip(outputs, targets, strict=True):
        assert torch.equal(ours, theirs)  # nothing has changed before the first block
    model = load_model(checkpoint, dtype=torch.float32)
    first = model.model.layers[1]
    seen = []
    hook = first.register_forward_hook(lambda _, args, output: seen.append(output))
    with torch.no_grad():
        for batch in tokens:
            model(input_ids=batch)
    hook.remove()
    for ours, theirs in zip(solver.shown[1][1], seen, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(solver.shown[1][0][0], seen[0], rtol=1e-2, atol=1e-3)
    again = sweep_blocks(
        checkpoint, tokens, WholeBlock(), SweepOptions(work=tmp_path / "w", precision="fp32")
    )
    assert again.reports == swept.reports


def test_spilled_activations_give_the_same_bytes(tmp_path):
    checkpoint = open_checkpoint(save_family("qwen2", tmp_path / "model"))
    kept = sweep_linears(checkpoint, batches(250), Recorder(0.1), SweepOptions(work=tmp_path / "kept"))
    spilled = sweep_linears(
        checkpoint, batches(250), Recorder(0.1), SweepOptions(work=tmp_path / "spilled", spill_bytes=3000)
    )
    for ours, theirs in zip(kept.files, spilled.files, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    assert not (tmp_path / "spilled/activations").exists()


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_depth(tmp_path):
    """Peak RSS above the imports stays under 1.5 x (block + activations + waiting passes + accumulators), for
    3 and for 12 blocks."""
    used = {depth: memory.sweep_peak(tmp_path, depth) for depth in (3, 12)}
    libraries = 40e6  # buffers of the matrix products, whatever the model
    assert 60e6 < min(used.values()) <= max(used.values()) < memory.sweep_bound() + libraries, used
    assert used[12] < 1.2 * used[3] + 20e6, used


@pytest.mark.parametrize(("precision", "products"), [("fp32", "highest"), ("bf16", "medium")])
def test_statistics_are_summed_in_the_precision_of_the_sweep(tmp_path, precision, products, monkeypatch):
    asked, add = [], Hessian.add

    def noted(self, x, importance=None):
        asked.append(torch.get_float32_matmul_precision())
        add(self, x, importance)

    monkeypatch.setattr(Hessian, "add", noted)
    checkpoint = open_checkpoint(save_family("llama3", tmp_path / "model", num_hidden_layers=1))
    sweep_linears(
        checkpoint,
        batches(checkpoint.config["vocab_size"], 1),
        Recorder(),
        SweepOptions(work=tmp_path / "w", precision=precision),
    )
    assert set(asked) == {products} and torch.get_float32_matmul_precision() == "highest"


def test_a_solver_that_fails_leaves_gradients_as_they_were(tmp_path):
    class Failing(Recorder):
        def solve(self, weights, seen):
            assert not torch.is_grad_enabled()
            raise ZeroDivisionError

    source = save_family("llama3", tmp_path / "model")
    options = SweepOptions(work=tmp_path / "work")
    with pytest.raises(ZeroDivisionError):
        sweep_linears(open_checkpoint(source), batches(320), Failing(), options)
    assert torch.is_grad_enabled()


def test_blocks_that_take_keys_of_others_are_not_run_one_at_a_time(tmp_path):
    """A call is recorded once for all batches, and the keys of one text are not those of another."""
    shape = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    model = tiny_models.build("gemma4", **shape, num_kv_shared_layers=2)
    offloaded = OffloadedModel(open_checkpoint(tiny_models.save(model, tmp_path / "m")), torch.device("cpu"))
    with pytest.raises(ModelError, match="one at a time: the last ones take keys and values of others"):
        offloaded.trace([torch.arange(8)[None]], {})
