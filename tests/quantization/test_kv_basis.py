"""What keys are rounded in, from calibration: the formulas, the file, and that both runners read it."""

import json

import pytest
import torch

from attar.checkpoint.open import open_checkpoint
from attar.errors import CheckpointError, ModelError, SettingsError
from attar.progress import SILENT
from attar.quantization.kv_basis import KeyStatistics, basis_over, check_cache
from attar.quantization.plan import plan
from attar.quantization.stage import quantize
from attar.runtime.kv.basis_file import read_basis
from attar.runtime.loading import load
from tests import tiny_models
from tests.quantization.packing import settings_for


def test_the_formulas():
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 50, heads, 8, generator=draw).double() for heads in (4, 2))
    k[..., 3] *= 2
    statistics = KeyStatistics()
    for queries, keys in zip(q, k, strict=True):
        statistics.observe(0, None, queries, keys)
        statistics.observe(0, None, queries[:1] + 1, keys[:1] + 1)
    basis = statistics.basis()
    later, first = k[:, 1:], k[:, 0] + 1  # a first token counts where it is alone
    mean = later.mean((0, 1))
    torch.testing.assert_close(basis.centers[:, 0].double(), torch.stack((mean, first.mean(0))))
    spread = (later - mean).square().mean((0, 1))
    products = q[:, 1:].unflatten(2, (2, 2)).square().mean((0, 1, 3))
    want = (products / spread) ** 0.25
    want /= want.log().mean(-1, keepdim=True).exp()
    torch.testing.assert_close(basis.factors[0].double(), want)
    assert (basis.factors[0, :, 3] < 0.9).all()


def test_rows_begin_all_over_the_context(tmp_path, monkeypatch):
    """A mean of few positions is another one, and a first token is at position 0."""
    checkpoint = open_checkpoint(tiny_models.save(tiny_models.build("llama3"), tmp_path / "model"))
    spans = []
    monkeypatch.setattr(KeyStatistics, "observe", lambda self, layer, span, *_: spans.append(span))
    monkeypatch.setattr(KeyStatistics, "basis", lambda self: None)
    context, row = checkpoint.config["max_position_embeddings"], list(range(24))
    basis_over(checkpoint, [row] * 3, SILENT)
    assert {(span.start, span.stop) for span in spans if span.stop - span.start == 1} == {(0, 1)}
    starts = {span.start for span in spans if span.stop - span.start > 1}
    assert starts == {0, (context - 24) // 2, context - 24}


def test_a_checkpoint_keeps_it_and_the_runtime_reads_it(tmp_path):
    folder = tiny_models.save(tiny_models.build("llama3"), tmp_path / "model")
    sizes = {"samples": 3, "sequence_length": 24, "check_tokens": 0}
    chosen = settings_for(scheme="W8A16", method="rtn", kv_cache="int4", **sizes)
    quantized = quantize(folder, tmp_path / "out", chosen)
    assert quantized.card.details["kv_cache"] == {"rows": 3, "tokens": 72}
    runner = load(quantized, runner="modules", kv_dtype="int4", kv_tokens=64).runner
    pool = runner.pool.geometry
    basis = read_basis(quantized.path, pool.layers, pool.kv_heads, pool.head_dim)
    assert torch.equal(runner.pool.store.basis.factors, basis.factors) and basis.factors.std() > 0.01
    path, before = quantized.path / "attar-kv.json", quantized.fingerprint()
    stored = json.loads(path.read_text())
    negative = [[[-1.0] * pool.head_dim] * pool.kv_heads] * pool.layers
    for damaged in ({"centers": 1}, {**stored, "factors": negative}):
        path.write_text(json.dumps(damaged))
        with pytest.raises(CheckpointError, match=r"attar-kv\.json"):
            load(quantized, runner="modules", kv_dtype="int4", kv_tokens=64)
    assert quantized.fingerprint() != before


@pytest.mark.parametrize(
    ("family", "reason"),
    [("deepseek_v3", "latents"), ("mamba2", "no keys"), ("gemma4", "one shape for all layers")],
)
def test_what_has_no_basis_is_refused_before_any_work(family, reason, tmp_path):
    folder = tiny_models.save(tiny_models.build(family), tmp_path / "model")
    with pytest.raises((SettingsError, ModelError), match=reason):
        plan(open_checkpoint(folder), settings_for(kv_cache="int4").storage)


def test_a_model_whose_code_reads_its_weights_is_not_refused():
    config = tiny_models.build("gpt2").config.to_dict()
    check_cache(config)
