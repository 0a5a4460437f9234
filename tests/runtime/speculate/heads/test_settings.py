"""A head as the draft of a model: what is refused before anything is read, what it takes, its name."""

import json

import pytest
import torch

from attar.cli.main import call
from attar.errors import SettingsError
from attar.measure.speculation.run import run_profile
from attar.models.draft_heads.folder import save_draft_head
from attar.models.draft_heads.medusa_module import MedusaConfig, MedusaHeads
from attar.runtime import loading
from attar.runtime.kv.compose import reason
from attar.runtime.kv.evict import H2O, SnapKV, Streaming
from attar.runtime.llm import LLM
from attar.runtime.settings import BenchSettings, EngineSettings
from attar.runtime.speculate.settings import ProfileSettings
from tests import tiny_models
from tests.marks import slow_but

EVICTIONS = {
    "streaming": Streaming(sinks=2, window=9),
    "snapkv": SnapKV(capacity=8, window=4),
    "h2o": H2O(heavy=4, recent=4),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and two heads of it, which read different layers."""
    root = tmp_path_factory.mktemp("heads")
    model = tiny_models.build("llama3", max_position_embeddings=1024)
    target = tiny_models.save(model, root / "target")
    heads = []
    for name, layers, drafts in (("one", (3,), 3), ("two", (1, 3), 2)):
        config = MedusaConfig(hidden=64, vocabulary=tiny_models.VOCABULARY, layers=layers, drafts=drafts)
        head = MedusaHeads(config)
        head.start_from(model.lm_head.weight.detach())
        (root / name).mkdir()
        save_draft_head(head, root / name, target="target", dtype=torch.float32)
        heads.append(root / name)
    return target, *heads


@pytest.mark.parametrize("name", EVICTIONS)
def test_eviction_is_refused_with_its_sentence_before_anything_is_read(folders, name):
    with pytest.raises(SettingsError) as actual:
        LLM("no such folder", draft=folders[1], eviction=EVICTIONS[name])
    assert actual.value.message.startswith("draft is 'one'") and f"eviction='{name}'" in actual.value.message
    assert (reason(name, "hidden_states") in actual.value.message) or name == "h2o"


@pytest.mark.few(1)
@pytest.mark.parametrize("runner", slow_but(("modules", "compiled", "device"), "modules", "compiled"))
def test_the_default_pool_counts_the_states_and_the_description_names_the_head(folders, monkeypatch, runner):
    target, one, two = folders
    monkeypatch.setattr(loading, "POOL_BYTES", 1 << 20)
    options = {"runner": runner, "dtype": "bfloat16" if runner == "compiled" else "float32"}
    plain = LLM(target, **options).describe()
    token_bytes = (1 << 20) / plain.kv_tokens
    assert plain.hidden_bytes == 0
    for head, layers in ((one, 1), (two, 2)):
        described = LLM(target, draft=head, **options).describe()
        spare = 16 if runner == "device" else 0  # tokens of the block that padding is written to
        assert described.hidden_bytes == (described.kv_tokens + spare) * layers * 64 * 2
        both = described.kv_tokens * token_bytes + described.hidden_bytes
        assert 0.97 < both / (1 << 20) < 1.03, "but for the last block"
        assert f"{head.name} (medusa)" in described.speculation
        assert any("hidden states" in line for line in described.lines())


def test_the_plan_counts_the_states(folders, capsys):
    target, one, two = folders
    rows = []
    for arguments in ([], ["--draft", str(one)], ["--draft", str(two)], ["--draft", str(target)]):
        options = ["--context", "64", "--kv-dtype", "bfloat16", "--json", *arguments]
        assert call(["plan-kv", str(target), *options]) == 0
        rows.append(json.loads(capsys.readouterr().out))
    plain, *with_heads, model = rows
    assert model == plain and plain["hidden_bytes"] == 0
    for data, layers in zip(with_heads, (1, 2), strict=True):
        assert data["hidden_bytes"] == layers * 64 * 2
        token = plain["token_bytes"]["bfloat16"] + layers * 64 * 2
        assert data["token_bytes"]["bfloat16"] == token and data["cells"][0]["bytes"] == 64 * token


@pytest.mark.slow
def test_times_are_measured(folders):
    target, one, _ = folders
    for tokens in (512, 64):
        llm = LLM(target, draft=one, dtype="float32", kv_tokens=tokens, runner="modules")
        times = llm.engine.speculator.proposer.times()
        assert set(times.step) == set(times.begin) == ({1, 8} if tokens == 512 else {1})
        assert all(seconds >= 0 for seconds in (*times.step.values(), *times.begin.values(), times.reading))
        assert times.begin[1] + 3 * times.step[1] > 0
        assert llm.engine.speculator.most == 3


@pytest.mark.slow
def test_two_heads_and_plain_decoding_side_by_side(folders):
    target, one, two = folders
    methods = ProfileSettings(
        draft=(str(one), str(two)), drafts=(2,), fixed=True, prompts=1, sets=("random",)
    )
    bench = BenchSettings(tokens=12, rounds=1)
    engine = EngineSettings(dtype="float32", kv_tokens=512, runner="modules")
    profile = run_profile(str(target), methods, bench, engine)
    methods = [f"{name}, 2" for name in (one, two, f"{one}+suffix", f"{two}+suffix")]
    assert [row.method for row in profile.rows] == ["plain", *methods]
    assert all(row.same == row.texts for row in profile.rows)
    assert profile.rows[1].acceptance is not None
    assert profile.rows[1].histogram == profile.rows[2].histogram, "their first two heads are the same"
