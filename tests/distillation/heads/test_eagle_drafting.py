"""EAGLE and EAGLE-3 from training to drafts."""

import pytest

import attar
from attar.distillation.rollouts import teacher
from tests import tiny_models


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    model = tiny_models.build("qwen2")
    return tiny_models.save(model, tmp_path_factory.mktemp("eagle") / "target")


CASES = {
    "eagle2": {"head": "eagle", "branches": 3},
    "eagle3": {"head": "eagle3", "draft_vocabulary": 100, "unrolled": 3},
}


SLOW = {
    "eagle": {"head": "eagle"},
    "two layers": {"head": "eagle3", "head_layers": 2, "branches": 2},
    "eagle3.1": {"head": "eagle3", "norms": "3.1"},
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [*CASES.values(), *(pytest.param(options, marks=pytest.mark.slow) for options in SLOW.values())],
    ids=[*CASES, *SLOW],
)
def test_from_training_to_drafts(options, target, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher, "HELD_OUT_TOKENS", 64)
    steps = {"steps": 3, "batch_size": 2, "sequence_length": 32, "num_rollouts": 4, "precision": "fp32"}
    head = attar.train_head(target, tmp_path / "head", data="python-stdlib", drafts=3, **steps, **options)
    config = head.config["head"]
    assert head.card.details["steps"] == 3 and config["kind"] == options["head"]
    assert config["shape"]["kv_heads"] == 4 and config["draft_vocabulary"] == options.get(
        "draft_vocabulary", 0
    )
    assert len(head.card.details["drafting"]["acceptance"]) == 3
    prompts = [[5, 6, 7, 8, 9], [10, 11, 12]]
    greedy = attar.SamplingParams(max_tokens=20, temperature=0.0)
    plain = attar.LLM(target, dtype="float32").generate(prompts, greedy)
    drafted = attar.LLM(target, draft=head.path, dtype="float32").generate(prompts, greedy)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
