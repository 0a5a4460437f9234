"""A student learns from text that its teacher wrote: answers alone; no teacher is run, its terms go on."""

import json

import pytest

import attar
from attar.checkpoint.card import Card, Parent
from attar.cli.main import call
from attar.data.provenance import card_path
from attar.distillation.settings import distill_settings, recover_settings
from attar.distillation.stage import distill, recover
from attar.errors import LicenceError
from tests import tiny_models
from tests.log_lines import LogLines

TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
SMALL = {
    "steps": 8,
    "batch_size": 4,
    "sequence_length": 64,
    "learning_rate": 3e-3,
    "precision": "fp32",
}


@pytest.fixture
def model(tmp_path):
    folder = tiny_models.save(tiny_models.build("smollm"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder


@pytest.fixture
def data(tmp_path):
    """120 conversations whose answers follow a rule, and whose questions do not."""
    file = tmp_path / "data.jsonl"
    colours = ("red", "green", "blue")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{number * 7919 % 1000} {colours[number % 3]}"},
                {"role": "assistant", "content": f"{colours[number % 3]} it is"},
            ]
        }
        for number in range(120)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def card_of(data, *ids, **settings):
    teacher = Parent(role="signal", name="the-teacher", stage="original", licence={"ids": list(ids)})
    card = Card(name=data.name, stage="collect", settings=settings, parents=(teacher,))
    card_path(data).write_text(json.dumps(card.to_dict()))


def test_the_loss_on_held_out_answers_falls_and_no_teacher_is_run(model, data, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("the teacher is run")

    monkeypatch.setitem(attar.distillation.signals.SIGNALS, "online", refuse)
    monkeypatch.setitem(attar.distillation.signals.SIGNALS, "cached", refuse)
    card_of(data, "mit")
    settings = {**SMALL, "steps": 60, "evaluate_every": 20, "packing": "separate", "keep_layers": 1.0}
    card = attar.distill(model, tmp_path / "out", objective="sft", data=str(data), **settings).card
    losses = [row["held_out"] for row in card.details["curve"] if "held_out" in row]
    assert losses[-1] < 0.5 * losses[0]
    assert [(parent.role, parent.name, parent.stage) for parent in card.parents] == [
        ("weights", "model", "original"),
        ("signal", "data.jsonl", "collect"),
    ]
    train, held_out = card.details["text"]
    assert train["conversations"] + held_out["conversations"] <= 120
    assert train["dropped"] == held_out["dropped"] == 0
    assert 0 < train["predicted"] < train["tokens"] / 2
    assert card.licence["status"] == "allow_with_duties"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("objective", "predict", "less"),
    [("sft", "auto", True), ("sft", "all", False), ("kl", "auto", False), ("kl", "answers", True)],
)
def test_which_tokens_are_predicted(model, data, tmp_path, objective, predict, less):
    settings = distill_settings(**{**SMALL, "steps": 1}, objective=objective, predict=predict, data=str(data))
    card = distill(model, tmp_path / "out", settings).card
    assert ("predicted" in card.details["text"][0]) == less


def test_a_collection_whose_terms_forbid_it_stops_before_any_work(model, data, tmp_path):
    card_of(data, "openai-api")
    options = {**SMALL, "steps": 1, "data": str(data)}
    for objective in ("sft", "kl"):
        with pytest.raises(LicenceError, match=r"the-teacher: OpenAI .* does not allow"):
            distill(model, tmp_path / "out", distill_settings(**options, objective=objective))
    with pytest.raises(LicenceError, match="OpenAI"):
        recover(model, tmp_path / "out", recover_settings(**options, alpha=0.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "data.jsonl.card.json", "model"]
    accepted = {"accept_licence": ("openai-api",), "reason": "permission of 2026-02-01"}
    card = distill(model, tmp_path / "out", distill_settings(**options, objective="sft", **accepted)).card
    assert card.licence["accepted"] == [{"id": "openai-api", "reason": "permission of 2026-02-01"}]
    assert card.settings["reason"] == "permission of 2026-02-01"


def test_an_acceptance_of_the_collection_holds_for_its_students(model, data, tmp_path):
    card_of(data, "openai-api", accept_licence=["openai-api"], reason="permission by letter")
    settings = distill_settings(**{**SMALL, "steps": 1}, objective="sft", data=str(data))
    card = distill(model, tmp_path / "out", settings).card
    assert card.licence["accepted"] == [{"id": "openai-api", "reason": "permission by letter"}]
    assert card.licence["status"] == "block"


def test_a_teacher_of_another_family_stops_recovery(model, data, tmp_path, capsys):
    teacher = tiny_models.save(tiny_models.build("smollm"), tmp_path / "teacher")
    (teacher / "README.md").write_text("---\nlicense: llama3\n---\n")
    options = recover_settings(**SMALL, data=str(data))
    with pytest.raises(LicenceError, match=r"teacher: Meta Llama 3 .*1\.b\.v.*2024-04-18"):
        recover(model, tmp_path / "out", options, teacher=teacher)
    (model / "README.md").write_text("---\nlicense: llama3\n---\n")
    words = ["recover", str(model), "-o", str(tmp_path / "out"), "--teacher", str(teacher)]
    words += ["--steps", "1", "--batch-size", "2", "--sequence-length", "32", "--data", str(data)]
    assert call([*words, "--accept-licence", "llama3"]) == 2
    assert "--reason is ''" in capsys.readouterr().err
    assert call(words) == 0
    assert "duty: Show the words 'Built with Meta Llama 3'." in capsys.readouterr().err
    assert Card.read(tmp_path / "out").licence["name_prefix"] == "Llama 3"


def test_unknown_authors_are_a_warning_and_stay_unknown(model, data, tmp_path):
    progress = LogLines()
    settings = distill_settings(**{**SMALL, "steps": 1}, objective="sft", data=str(data))
    card = distill(model, tmp_path / "out", settings, progress=progress).card
    assert card.licence["status"] == "unknown"
    assert any(line.startswith(f"warning: {data}: licence unknown") for line in progress.lines)


@pytest.mark.slow
def test_from_a_teacher_s_answers_to_a_student(tmp_path):
    prompts, data = tmp_path / "prompts.txt", tmp_path / "data.jsonl"
    prompts.write_text("".join(f"def function_{number}(" + "\n" for number in range(60)))
    sampling = {"samples": 4, "max_tokens": 24, "temperature": 1.0, "keep_cut": True}
    result = attar.collect(prompts, data, teacher="attar:tiny", **sampling)
    assert result.filters.kept > 150
    settings = {"steps": 40, "batch_size": 8, "sequence_length": 64, "evaluate_every": 4, "precision": "fp32"}
    options = {**settings, "objective": "sft", "data": str(data), "packing": "separate"}
    card = attar.distill("attar:tiny", tmp_path / "out", **options).card
    losses = [row["held_out"] for row in card.details["curve"] if "held_out" in row]
    assert losses[-1] < 0.9 * losses[0]
    collected = card.parents[1]
    assert (collected.role, collected.name, collected.stage) == ("signal", "data.jsonl", "collect")
    assert [parent.name for parent in collected.parents] == ["attar:tiny"]
    assert {source["role"] for source in card.licence["sources"]} == {"weights", "signal"}
