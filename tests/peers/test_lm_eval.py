"""lm-evaluation-harness on the same rows: its figures through the adapter, its own model's, and attar's."""

from __future__ import annotations

import json
import math
from functools import cache

import pytest
import torch

from attar import chat_template
from attar.measure.multiple_choice import answer_task, read_questions, task_score
from attar.measure.subject import load_subject
from tests import tiny_models
from tests.measure.test_multiple_choice import ROWS, slow, write
from tests.test_chat_template import BRIEF

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("lm_eval.models")  # registers its own

pytestmark = pytest.mark.peers

TASK = """\
task: rows
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{q}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: label
metric_list:
  - {{metric: acc}}
  - {{metric: acc_norm}}
metadata: {{version: 1}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save(tiny_models.build("llama3"), tmp_path_factory.mktemp("harness") / "model")


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    short = [row for row in ROWS if isinstance(row["label"], int)]
    words = ["alpha", "beta", "def add", "gamma ray", "ü", "12", "return", "x = y"]
    for _ in range(12):
        picks = torch.randperm(8, generator=generator).tolist()
        short.append(
            {"q": words[picks[0]] + "?", "choices": [words[n] for n in picks[1:4]], "label": picks[0] % 3}
        )
    return short


def harness(model, arguments, folder, file):
    from lm_eval.tasks import TaskManager

    import attar.measure.harness  # noqa: F401  (registers the model)

    (folder / "rows.yaml").write_text(TASK.format(file=file))
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    actual = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["rows"],
        task_manager=tasks,
        bootstrap_iters=10,
        log_samples=True,
    )
    likelihoods = [
        [float(answer[0]) for answer in row["filtered_resps"]] for row in actual["samples"]["rows"]
    ]
    return actual["results"]["rows"], likelihoods


@pytest.mark.parametrize("runner", ["transformers", "auto"])
def test_equal_figures_on_equal_rows(folder, rows, tmp_path, runner):
    file = write(tmp_path / "rows.jsonl", rows)
    subject = load_subject(folder, runner=runner)
    ours = task_score(file, answer_task(subject, read_questions(file)))
    theirs, through = harness("attar", f"pretrained={folder},runner={runner}", tmp_path, file)
    assert (ours.acc, ours.acc_norm) == (theirs["acc,none"], theirs["acc_norm,none"])
    assert math.isclose(ours.acc_stderr, theirs["acc_stderr,none"], rel_tol=1e-6)
    plain, wanted = harness("hf", f"pretrained={folder},dtype=float32,device=cpu", tmp_path, file)
    assert (plain["acc,none"], plain["acc_norm,none"]) == (ours.acc, ours.acc_norm)
    for one, other in zip(through, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-3 if runner == "transformers" else 0.05)


def test_texts_and_answers(folder):
    from lm_eval.api.instance import Instance

    from attar.measure.harness import Harness

    exact, served = (Harness(str(folder), runner=runner) for runner in ("transformers", "modules"))
    text = "def add(a, b):\n    return a + b\n" * 20
    assert len(exact.tok_encode(text)) > exact.max_length
    ask = [Instance("loglikelihood_rolling", {}, (text,), 0)]
    theirs = lm_eval.api.registry.get_model("hf")(
        pretrained=str(folder), dtype="float32", device="cpu", batch_size=2
    )
    assert exact.loglikelihood_rolling(ask) == pytest.approx(theirs.loglikelihood_rolling(ask), rel=1e-4)
    question = [Instance("generate_until", {}, ("def add", {"until": ["\n"], "max_gen_toks": 12}), 0)]
    wanted = theirs.generate_until(question)
    assert exact.generate_until(question) == wanted
    assert served.generate_until(question) == wanted
    empty = [Instance("loglikelihood", {}, ("", "def"), 0)]
    assert exact.loglikelihood(empty)[0][0] == pytest.approx(theirs.loglikelihood(empty)[0][0], rel=1e-4)


def test_the_slow_loop_agrees_with_the_harness(folder, rows, tmp_path):
    file = write(tmp_path / "rows.jsonl", rows)
    _, wanted = harness("hf", f"pretrained={folder},dtype=float32,device=cpu", tmp_path, file)
    exact = load_subject(folder)
    for row, likelihoods in zip(rows, wanted, strict=True):
        assert slow(exact, row)[0] == pytest.approx(likelihoods, abs=1e-3), json.dumps(row)


@pytest.mark.parametrize("answer_begins", [True, False])
def test_chats_are_rendered_as_the_harness_does_and_within_bounds(folder, answer_begins, monkeypatch):
    from attar.measure.harness import Harness

    ours = Harness(str(folder))
    theirs = lm_eval.api.registry.get_model("hf")(pretrained=str(folder), dtype="float32", device="cpu")
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<a>' * add_generation_prompt }}"
    )
    ours.tokenizer.chat_template = theirs.tokenizer.chat_template = template
    chat = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "Two "}]
    assert ours.apply_chat_template(chat, answer_begins) == theirs.apply_chat_template(chat, answer_begins)
    ours.tokenizer.chat_template = "{% for i in range(10 ** 9) %}{% endfor %}"
    monkeypatch.setattr(chat_template, "_process", cache(lambda pid: BRIEF))
    with pytest.raises(chat_template.TemplateCostError):
        ours.apply_chat_template(chat, answer_begins)
