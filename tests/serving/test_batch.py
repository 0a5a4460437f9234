"""Many prompts to a file: order, the journal, a poison row, a worker that dies."""

import json

import pytest

from attar.cluster.settings import ClusterSettings
from attar.cluster.tasks import LOST, TaskOutcome, perform
from attar.errors import OutputError
from attar.runtime.llm import LLM
from attar.runtime.settings import EngineSettings, TextSettings
from attar.serving import batch

PROMPTS = ["def f", "import ", "def f", "class A"]


class Deadly:
    """Workers in this process; a batch with the word in a prompt kills its worker."""

    def __init__(self, word=None):
        self.word, self.ended, self.batches = word, [], []

    def free(self):
        return not self.ended

    def submit(self, task):
        rows = [record["row"] for record in task.arguments["rows"]]
        self.batches.append(rows)
        killed = self.word is not None and any(self.word in row for row in rows)
        outcome = (
            TaskOutcome(task.id, LOST, message="its process was killed by SIGSEGV")
            if killed
            else perform(task.id, task.function, json.loads(json.dumps(task.arguments)))
        )
        self.ended.append(outcome)

    def wait(self):
        return self.ended.pop()

    def close(self):
        pass


@pytest.fixture(autouse=True)
def the_folder_stays(monkeypatch):
    """A task goes to the folder of its batch; the tests behind it do not."""
    monkeypatch.chdir(".")


@pytest.fixture
def generate(tmp_path, monkeypatch):
    def call(prompts=PROMPTS, word=None, size=2, **options):
        workers = Deadly(word)
        monkeypatch.setattr("attar.serving.batch.actors_of", lambda settings: workers)
        result = batch.generate_to_file(
            "attar:tiny",
            prompts,
            tmp_path / "out.jsonl",
            TextSettings(max_tokens=4, temperature=0.0),
            EngineSettings(),
            ClusterSettings(),
            batch=size,
            **options,
        )
        return result, [json.loads(line) for line in result.path.read_text().splitlines()], workers.batches

    return call


def texts(lines):
    return [line["samples"][0]["text"] if "samples" in line else line["error"] for line in lines]


def test_completions_are_those_of_one_process_in_the_order_of_the_prompts(generate):
    result, lines, _ = generate()
    direct = LLM("attar:tiny").generate(PROMPTS, TextSettings(max_tokens=4, temperature=0.0).params())
    assert texts(lines) == [one.samples[0].text for one in direct]
    assert [line["prompt"] for line in lines] == PROMPTS and (result.prompts, result.errors) == (4, 0)


def test_the_journal_does_nothing_twice(generate):
    _, before, _ = generate()
    with pytest.raises(OutputError, match="already exists"):
        generate()
    _, lines, batches = generate(force=True)
    assert batches == [] and lines == before
    _, lines, batches = generate([*PROMPTS, "while "], force=True)
    assert batches == [["while "]] and lines[:4] == before


def test_a_row_that_kills_its_worker_is_one_error(generate):
    result, lines, batches = generate(["def f", "poison", "import "], word="poison")
    assert texts(lines)[1] == "its process was killed by SIGSEGV" and result.errors == 1
    assert all("samples" in line for line in (lines[0], lines[2]))
    assert batches == [["def f", "poison"], ["import "], ["def f"], ["poison"], ["poison"]]
    _, lines, batches = generate(["def f", "poison", "import "], force=True)  # tried again, and well now
    assert batches == [["poison"]] and all("samples" in line for line in lines)


def test_a_prompt_that_does_not_fit_is_one_error(generate):
    result, lines, batches = generate(["def f", "x = 1\n" * 4000, "import "], size=3)
    assert result.errors == 1 and "error" in lines[1] and len(batches) == 1
    assert all("samples" in line for line in (lines[0], lines[2]))


def test_another_model_on_a_worker_is_refused():
    outcome = perform(
        "a",
        batch.FUNCTION,
        {
            "model": "attar:tiny",
            "fingerprint": "another",
            "engine": {},
            "text": {},
            "chat": False,
            "rows": [],
            "folder": "/",
        },
    )
    assert "another model" in outcome.message
