"""Which layers of the int4 cache keep 8 bits: the choice, its losses, its file, and both runners with it."""

import copy
import itertools
import json
import random
from dataclasses import replace

import pytest
import torch

from attar.checkpoint.open import open_checkpoint
from attar.errors import CheckpointError, SettingsError
from attar.progress import SILENT
from attar.quantization.kv_bits import choose_formats, layer_losses
from attar.quantization.plan import plan
from attar.quantization.stage import quantize
from attar.runtime.kv.memory import LayerShape, block_bytes, with_formats
from attar.runtime.kv.store.rotated import CacheBasis
from attar.runtime.loading import load
from attar.runtime.model_bytes import model_bytes
from attar.runtime.runner.compiled import compiled
from attar.runtime.runner.device.runner import device_runner
from attar.runtime.runner.modules import Modules
from attar.runtime.step import StepInput, TokenSpan
from attar.walks.objectives import token_kl
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.log_lines import LogLines
from tests.quantization.packing import settings_for

LENGTH, BLOCKS = 40, (2, 0, 1)
FORMATS = ("int4", "int8", "int8", "int4", "int4")


def basis_of(layers, kv_heads=2, head_dim=32):
    return CacheBasis.of_centers(torch.zeros(2, layers, kv_heads, head_dim))


def test_the_choice_against_all_choices():
    draw = random.Random(0)
    for _ in range(20):
        losses = [draw.choice((0.0, draw.random())) for _ in range(6)]
        kv_bits = draw.uniform(5.0, 9.0)  # heads of 32 take 5 and 9
        choice = choose_formats(losses, basis_of(6), kv_bits)
        best = min(
            sum(loss for loss, wide in zip(losses, some, strict=True) if not wide)
            for some in itertools.product((False, True), repeat=6)
            if 5 + 4 * sum(some) / 6 <= kv_bits
        )
        assert choice.kl == pytest.approx(best) and choice.bits <= kv_bits
        assert choice.bits == pytest.approx(5 + 4 * choice.formats.count("int8") / 6)


def test_the_ends_of_the_budget():
    assert choose_formats([1.0, 2.0, 3.0], basis_of(3), 5.0).formats == ("int4",) * 3
    assert choose_formats([1.0, 2.0, 3.0], basis_of(3), 9.0).formats == ("int8",) * 3
    assert choose_formats([1.0, 3.0, 2.0], basis_of(3), 6.4).formats == ("int4", "int8", "int4")


def tokens(count, seed=3):
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny_models.VOCABULARY, (count,), generator=drawn).tolist()


def model(layers=5, head_dim=32):
    """Of four key heads."""
    sizes = {"num_hidden_layers": layers, "head_dim": head_dim, "max_position_embeddings": 512}
    built = tiny_models.build("llama3", **sizes)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return built


def mixed(built, formats=FORMATS):
    """The mean keys of a model, with formats."""
    return replace(Modules(built, blocks=4, kv_dtype="int4").pool.store.basis, formats=formats)


def run(runner, ids, *cuts):
    """Logits of all tokens, in chunks."""
    rows, start = [], 0
    for stop in cuts:
        span = TokenSpan(0, start, stop, BLOCKS, stop - start)
        rows.append(runner.run(StepInput(ids[start:stop], (span,))))
        start = stop
    return torch.cat(rows)


def test_the_loss_is_what_the_layer_costs(tmp_path):
    """Of one layer, where no later layer sees the prompt: the KL of two caches over the last quarter."""
    built, ids = model(layers=1), tokens(40)
    checkpoint = open_checkpoint(tiny_models.save(copy.deepcopy(built), tmp_path / "model"))
    basis = mixed(copy.deepcopy(built), ("int4",))
    losses = layer_losses(checkpoint, basis, [ids[:25], ids[25:]], SILENT)
    rows = []
    for name in ("int8", "int4"):
        one = Modules(copy.deepcopy(built), blocks=4, kv_dtype="int4", basis=replace(basis, formats=(name,)))
        rows.append(run(one, ids, LENGTH)[30:])
    assert losses == pytest.approx([float(token_kl(*rows).mean())], rel=1e-3)


def test_a_text_longer_than_the_context_is_several_sequences(tmp_path):
    """And states of layers without keys go on from the prompt each time."""
    built = tiny_models.build("qwen3_5")
    checkpoint = open_checkpoint(tiny_models.save(built, tmp_path / "model"))
    runner = load(checkpoint, runner="modules", kv_dtype="int4", kv_tokens=64).runner
    longest = runner.context
    basis = runner.pool.store.basis
    one, two = ([tokens(longest, seed)] for seed in (1, 2))
    apart = [layer_losses(checkpoint, basis, rows, SILENT) for rows in (one, two)]
    together = layer_losses(checkpoint, basis, [*one, *two, [3, 4]], SILENT)
    assert together == pytest.approx([sum(some) / 2 for some in zip(*apart, strict=True)], rel=1e-4)


def test_a_checkpoint_keeps_the_choice_and_the_runtime_reads_it(tmp_path):
    folder = tiny_models.save(model(), tmp_path / "model")
    sizes = {"samples": 3, "sequence_length": 24, "check_tokens": 0}
    chosen = settings_for(scheme="W8A16", method="rtn", kv_cache="int4", kv_bits=8.0, **sizes)
    log = LogLines()
    quantized = quantize(folder, tmp_path / "out", chosen, progress=log)
    assert "KV cache: 3 of 5 layers keep 8 bits, 7.4 bits a number; predicted KL " in "".join(log.lines)
    report, path = quantized.card.details["kv_cache"], quantized.path / "attar-kv.json"
    stored = json.loads(path.read_text())
    wide = [layer for layer, name in enumerate(stored["formats"]) if name == "int8"]
    largest = sorted(range(5), key=report["losses"].__getitem__)[2:]
    assert wide == report["int8"] == sorted(largest) and report["bits"] == 5 + 4 * 3 / 5 <= 8
    runner = load(quantized, runner="modules", kv_dtype="int4", kv_tokens=64).runner
    block = 16 * 4 * 2 * (2 * (16 + 4) + 3 * (32 + 4))
    assert runner.pool.nbytes == 4 * block == runner.facts["kv_bytes"]
    assert runner.facts["kv_dtype"] == "int4, 3 of 5 layers int8"
    layers = with_formats([LayerShape(4, 32)] * 5, quantized.path)
    assert block_bytes(layers, "int4", 16) == block < block_bytes(layers, "int8", 16)
    more = model_bytes(quantized, runner="modules", kv_dtype="int4", kv_tokens=64)
    assert more - model_bytes(quantized, runner="modules", kv_dtype="int8", kv_tokens=64) == (
        4 * (block - block_bytes(layers, "int8", 16))
    )
    for damaged in (
        ["int4"] * 4,
        ["int4", "int8", "int4", "int8", "kivi4"],
        {"0": "int8"},
        [["int8"]] * 5,
        0,
    ):
        path.write_text(json.dumps({**stored, "formats": damaged}))
        with pytest.raises(
            CheckpointError, match=r"attar-kv\.json: formats are not int4 or int8 for each of 5"
        ):
            load(quantized, runner="modules", kv_dtype="int4", kv_tokens=64)
    path.write_text(json.dumps({**stored, "formats": ["int4"] * 5}))
    plain = load(quantized, runner="modules", kv_dtype="int4", kv_tokens=64).runner
    assert plain.facts["kv_dtype"] == "int4" and plain.pool.nbytes == 4 * 16 * 4 * 10 * (16 + 4)


@pytest.mark.parametrize(("kv_bits", "head"), [(4.9, "5 (int4) and 9 (int8)"), (9.1, "5 (int4)")])
def test_an_average_that_no_mix_has_is_refused_before_any_work(kv_bits, head, tmp_path):
    folder = tiny_models.save(model(), tmp_path / "model")
    storage = settings_for(kv_cache="int4", kv_bits=kv_bits).storage
    with pytest.raises(SettingsError) as problem:
        plan(open_checkpoint(folder), storage)
    assert head in str(problem.value) and "kv_bits" in str(problem.value)


@pytest.mark.parametrize(
    "changes", [{"kv_bits": 5.0}, {"kv_cache": "int8", "kv_bits": 5.0}, {"kv_cache": "int4", "kv_bits": -1.0}]
)
def test_a_budget_of_no_int4_cache_is_refused(changes):
    with pytest.raises(SettingsError, match="kv_bits"):
        settings_for(**changes)


@needs_compiler
@pytest.mark.parametrize("formats", [FORMATS, ("int8", "int4", "int4", "int4", "int8"), ("int8",) * 5])
def test_the_compiled_step_has_the_logits_of_the_modules(formats):
    built, ids = model(), tokens(LENGTH)
    basis = mixed(copy.deepcopy(built), formats)
    want = run(Modules(copy.deepcopy(built), blocks=4, kv_dtype="int4", basis=basis), ids, 33, 34, LENGTH)
    exact = run(Modules(copy.deepcopy(built), blocks=4), ids, LENGTH)
    ours = compiled(built.config, built.state_dict(), blocks=4, threads=2, kv_dtype="int4", basis=basis)
    between, error = run(ours, ids, 33, 34, LENGTH) - want, want - exact
    assert between.norm() < 0.3 * error.norm(), (between.norm(), error.norm())
    assert ours.facts["kv_dtype"] == f"int4, {formats.count('int8')} of 5 layers int8"
    block = 16 * 4 * 2 * sum({"int4": 16 + 4, "int8": 32 + 4}[name] for name in formats)
    assert len(ours.read_block(0)) == block <= ours.facts["kv_bytes"] // 4


def test_the_device_runner_has_them_too():
    built, ids = model(), tokens(LENGTH)
    basis = mixed(copy.deepcopy(built))
    ours = device_runner(built.config, built.state_dict(), blocks=4, kv_dtype="int4", basis=basis)
    want = run(Modules(copy.deepcopy(built), blocks=4, kv_dtype="int4", basis=basis), ids, 33, 34, LENGTH)
    exact = run(Modules(built, blocks=4), ids, LENGTH)
    between, error = run(ours, ids, 33, 34, LENGTH) - want, want - exact
    assert between.norm() < 0.1 * error.norm(), (between.norm(), error.norm())
    block = 16 * 4 * 2 * (3 * (16 + 4) + 2 * (32 + 4))
    assert len(ours.planes.read_block(0)) == block and ours.facts["kv_dtype"] == "int4, 2 of 5 layers int8"


@needs_compiler
def test_a_token_does_not_depend_on_threads_or_chunks():
    """Heads of 48 have 64 numbers in int4 and 48 in int8; 300 keys are divided among threads."""
    built, ids = model(head_dim=48), tokens(300)
    basis, logits = mixed(copy.deepcopy(built)), []
    for threads, cuts in ((1, (0, 299, 300)), (3, (0, 7, 100, 299, 300))):
        one = compiled(
            built.config, built.state_dict(), blocks=20, threads=threads, kv_dtype="int4", basis=basis
        )
        for start, stop in itertools.pairwise(cuts):
            rows = one.run(StepInput(ids[start:stop], (TokenSpan(0, start, stop, tuple(range(20)), 1),)))
        logits.append(rows)
    assert torch.equal(*logits)
    whole = Modules(built, blocks=20, kv_dtype="int4", basis=basis)
    want = whole.run(StepInput(ids, (TokenSpan(0, 0, 300, tuple(range(20)), 1),)))
    assert (logits[0] - want).norm() < 0.2 * want.norm(), (logits[0] - want).norm() / want.norm()


@needs_compiler
def test_blocks_and_slots_of_layers_of_both_formats_are_copied():
    built, ids = model(), tokens(LENGTH)
    settings = {"kv_dtype": "int4", "basis": mixed(copy.deepcopy(built)), "blocks": 8}
    for one in (compiled(built.config, built.state_dict(), **settings), Modules(built, **settings)):
        want = run(one, ids, 20, 40)[-1]
        blocks = getattr(one, "planes", one)
        blocks.write_block(6, blocks.read_block(2))
        one.move([(slot, 16 * 7 + slot) for slot in range(4)])  # of block 0
        span = TokenSpan(0, 20, 40, (6, 7, 1), 1)
        torch.testing.assert_close(one.run(StepInput(ids[20:40], (span,)))[0], want, rtol=0, atol=1e-5)
        copied = TokenSpan(0, 20, 40, (5, 4, 3), 1)
        rows = one.run(StepInput(ids[20:40], (copied,), ((2, 5), (0, 4))))
        torch.testing.assert_close(rows[0], want, rtol=0, atol=1e-5)
