"""Every verb over every odd checkpoint of :mod:`tests.odd_models`: it works, with the numbers that
transformers computes; it works and says what is odd; or it refuses in a line, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from attar.checkpoint.normal_form import METHODS
from attar.checkpoint.oddities import ODDITIES
from attar.cli.main import call
from attar.formats.readers import READERS
from attar.models.loading.configs import quiet
from attar.models.loading.load import load_model
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from tests import odd_models
from tests.odd_models import NOTE, ODD, REFUSED

TEXT = ["--data", str(Path(json.__file__).parent)]
SHORT = ["--sequence-length", "32", "--batch-size", "2", *TEXT]
CALIBRATED = ["--samples", "2", *SHORT]
QUANTIZE = ["quantize", "--scheme", "W8A16", "--group-size", "32", "--check-tokens", "0"]
PRUNE = ["prune", "--method"]
EXACT, NEAR, ANY = 1e-6, 3e-3, None
"""Largest KL from the model in transformers; None: the model is another one, of finite logits."""

VERBS: dict[str, tuple[list[str], float | None]] = {
    "rtn": ([*QUANTIZE, "--method", "rtn"], NEAR),
    "gptq": ([*QUANTIZE, "--method", "gptq", *CALIBRATED], NEAR),
    "wanda": ([*PRUNE, "wanda", *CALIBRATED], ANY),
    "layers": ([*PRUNE, "layers", "--ratio", "0.5", *CALIBRATED], ANY),
    "neurons": ([*PRUNE, "neurons", "--reconstruct", "none", *CALIBRATED], ANY),
    "distill": (["distill", "--keep-layers", "0.5", "--steps", "1", *SHORT], ANY),
    "recover": (["recover", "--alpha", "0", "--steps", "1", *SHORT], ANY),
    "dense": (["export", "--format", "dense"], EXACT),
    "gguf": (["export", "--format", "gguf", "--type", "F32"], EXACT),
}
"""Verbs that make a checkpoint of one: command line without the folders, and how near the result is."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> odd_models.OddFolders:
    """Good and odd models, each made once."""
    return odd_models.OddFolders(tmp_path_factory.mktemp("odd"))


@pytest.fixture
def attempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Callable[..., str]:
    """Run attar, or a function; what it printed. Compares code, words and what is left with the table."""

    def run(odd: odd_models.OddModel, verb: str, work: Callable[[], int]) -> str:
        verdict, words = odd.expected(verb)
        code = work()
        printed = capsys.readouterr()
        said = "\n".join([printed.err, *(record.getMessage() for record in caplog.records)])
        assert "bug of attar" not in said and "Traceback" not in said, said
        assert (code != 0) == (verdict == REFUSED), said
        if verdict == REFUSED:
            lines = [line for line in said.splitlines() if line.startswith("error")]
            assert len(lines) == 1 and words in said, said
            assert not list(tmp_path.iterdir()), "something was written"
        else:
            notes = [line for line in said.splitlines() if any(odd_note(line))]
            assert any(words in line for line in notes) if verdict == NOTE else not notes, said
        return printed.out

    return run


def odd_note(line: str) -> Any:
    """Whether a line is a note of the table: by the longest piece of its words between two facts."""
    for row in ODDITIES.values():
        pieces = [piece.split("}")[-1] for piece in row.words.split("{")]
        yield row.verdict == NOTE and max(pieces, key=len) in line


@cache
def logits(folder: Path) -> torch.Tensor:
    """What transformers computes, float32 (rows, tokens, vocabulary)."""
    with quiet(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        rows = torch.arange(5, 29).reshape(2, 12)
        return model(rows).logits


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean over the positions."""
    a, b = p.log_softmax(-1), q.log_softmax(-1)
    return float((a.exp() * (a - b)).sum(-1).mean())


def check_content(folders: odd_models.OddFolders, name: str, out: Path, bound: float | None) -> None:
    """The result computes what the model of the reference does."""
    if ODD[name].reference == "":
        assert list(out.glob("*.safetensors"))
        return
    with torch.no_grad():
        result = load_model(out, dtype=torch.float32)(torch.arange(5, 29).reshape(2, 12)).logits
    assert bool(result.isfinite().all())
    if bound is not None:
        assert kl(logits(folders.reference(name)), result) < bound
    if out.is_dir():
        assert "auto_map" not in (out / "config.json").read_text()


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("verb", VERBS)
def test_verbs_that_make_a_checkpoint(verb, name, folders, attempt, tmp_path):
    options, bound = VERBS[verb]
    out = tmp_path / ("out.gguf" if verb == "gguf" else "out")
    model = folders.odd(name)
    attempt(ODD[name], verb, lambda: call([options[0], str(model), "-o", str(out), *options[1:]]))
    if ODD[name].expected(verb)[0] != REFUSED:
        check_content(folders, name, out, bound)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ODD)
def test_merge(name, folders, attempt, tmp_path, tmp_path_factory):
    recipe = tmp_path_factory.mktemp("recipe") / "merge.yml"
    model = folders.odd(name)
    recipe.write_text(
        f"merge_method: passthrough\nmodels:\n  - model: {json.dumps(str(model))}\ndtype: float32\n"
    )
    out = tmp_path / "out"
    attempt(ODD[name], "merge", lambda: call(["merge", str(recipe), "-o", str(out), "--tokens", "0"]))
    if ODD[name].expected("merge")[0] != REFUSED:
        check_content(folders, name, out, EXACT)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ODD)
def test_codes_in_another_layout(name, folders, attempt, tmp_path, tmp_path_factory):
    """What was quantized, exported to GPTQ."""
    if ODD[name].expected("rtn")[0] == REFUSED:
        return
    coded, out = tmp_path_factory.mktemp("coded") / "coded", tmp_path / "out"
    assert (
        call([QUANTIZE[0], str(folders.odd(name)), "-o", str(coded), *QUANTIZE[1:], "--method", "rtn"]) == 0
    )
    assert call(["export", str(coded), "-o", str(out), "--format", "gptq"]) == 0
    check_content(folders, name, out, NEAR)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ODD)
def test_evaluate(name, folders, attempt):
    options = ["--tokens", "64", "--sequence-length", "32", "--no-speed", "--json", *TEXT]
    odd = ODD[name]
    out = attempt(odd, "evaluate", lambda: call(["evaluate", str(folders.odd(name)), *options]))
    if odd.expected("evaluate")[0] != REFUSED:
        measured = json.loads(out)
        assert call(["evaluate", str(folders.reference(name)), *options]) == 0
        assert measured["perplexity"] > 1


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ODD)
def test_generate(name, folders, attempt):
    command = ["generate", str(folders.odd(name)), "-p", "the value", "--max-tokens", "3"]
    attempt(ODD[name], "generate", lambda: call(command))


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ODD)
def test_the_engine_that_serve_loads(name, folders, attempt, capsys):
    """Greedy tokens are those of transformers."""
    from attar.cli.guard import error_lines, print_lines
    from attar.errors import AttarError

    texts = []

    def work() -> int:
        try:
            llm = LLM(folders.odd(name), kv_tokens=256)
            texts.extend(
                llm.generate([[5, 9, 7]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
            )
        except AttarError as error:
            print_lines(*error_lines(error))
            return 1
        return 0

    attempt(ODD[name], "serve", work)
    if ODD[name].expected("serve")[0] == REFUSED:
        return
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folders.reference(name), dtype=torch.float32
        )
        rows = torch.tensor([[5, 9, 7]])
        expected = model.generate(rows, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(texts[0].token_ids) == expected[0, 3:].tolist()


@pytest.mark.few(8)
@pytest.mark.parametrize("name", ODD)
def test_inspect_opens_what_is_refused(name, folders, capsys):
    odd = ODD[name]
    if name == "Mistral's file alone":  # nothing to open
        return
    assert call(["inspect", str(folders.odd(name))]) == 0
    out = capsys.readouterr().out
    verdict, words = odd.expected("inspect")
    if verdict in (NOTE, REFUSED):
        assert verdict in out and words in out


def test_methods_in_folders_are_those_that_are_read():
    assert {*METHODS, "gguf"} == set(READERS)
