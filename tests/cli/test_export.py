"""``attar export -o NAME.gguf``: what the name of the output implies, the loss of the file, several types."""

import json
from pathlib import Path

import pytest

from attar.checkpoint.hashing import sha256_file
from attar.checkpoint.open import open_checkpoint
from attar.cli.main import call
from attar.deployment.settings import output_defaults
from attar.errors import SettingsError

TEXT = ["--data", str(Path(json.__file__).parent)]  # a few files: the whole library takes seconds to read


@pytest.mark.parametrize(
    ("given", "out", "dense", "implied"),
    [
        ({}, "a.gguf", True, {"format": "gguf", "type": "Q4_K_M"}),
        ({}, "a.gguf", False, {"format": "gguf"}),
        ({"type": "Q6_K"}, "a.gguf", True, {"format": "gguf", "type": "Q6_K"}),
        ({"size": "1GB"}, "folder", True, {"format": "gguf", "size": "1GB"}),
        ({"bits": 4.5}, "a.gguf", True, {"format": "gguf", "bits": 4.5}),
        ({"rounding": "gptq"}, "folder", True, {"format": "gguf", "type": "Q4_K_M", "rounding": "gptq"}),
        ({"format": "gguf"}, "a.gguf", True, {"format": "gguf"}),
        ({"format": "dense"}, "folder", True, {"format": "dense"}),
        ({}, "folder", True, {}),
    ],
)
def test_what_the_output_implies(given, out, dense, implied):
    assert output_defaults(given, out, lambda: dense) == implied


def test_a_file_has_one_format():
    with pytest.raises(SettingsError, match=r"gguf for a file a\.gguf"):
        output_defaults({"format": "dense"}, "a.gguf", lambda: True)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_gguf_file_ends_with_its_size_its_loss_and_ollamas_command(here, capsys):
    assert call(["export", "attar:tiny", "-o", "Mine.gguf", *TEXT]) == 0
    size, loss, command = capsys.readouterr().out.splitlines()
    assert size == "Mine.gguf  4.22 MB"
    assert "3.2x smaller, keeps " in loss and "KL 0.01" in loss and "2,048 held-out tokens" in loss
    # attar:tiny has a chat template or not: a Modelfile is written either way
    assert command == "ollama create mine -f Mine.Modelfile"
    card = open_checkpoint(here / "Mine.gguf").card
    assert 0.005 < card.measurements["kl_mean"] < 0.03
    told = (here / "Mine.md").read_text()
    assert f"nats a token | {card.measurements['kl_mean']:.4g}" in told, told
    assert card.files["Mine.md"] == sha256_file(here / "Mine.md")
    assert call(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["Mine.gguf", "export", "attar:tiny"]


def test_without_a_check_nothing_is_measured(here, capsys):
    assert call(["export", "attar:tiny", "-o", "a.gguf", "--type", "Q8_0", "--no-check"]) == 0
    assert "KL" not in capsys.readouterr().out
    assert open_checkpoint(here / "a.gguf").card.measurements == {}


@pytest.mark.slow
def test_several_types_are_a_file_each_and_one_table(here, capsys):
    assert call(["export", "attar:tiny", "-o", "t.gguf", "--types", "q8_0,Q5_0", *TEXT, "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert [one["card"]["settings"]["type"] for one in files] == ["q8_0", "Q5_0"]
    losses = [one["measurements"]["kl_mean"] for one in files]
    assert losses[0] < losses[1] and files[0]["bytes"] > files[1]["bytes"]
    assert sorted(path.name for path in here.glob("*.gguf")) == ["t-Q5_0.gguf", "t-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "a.gguf", "--types", "Q8_0,,Q4_0"], "each type once"),
        (["-o", "a.gguf", "--types", "Q8_0,Q8_0"], "each type once"),
        (["-o", "folder", "--types", "Q8_0,Q4_0"], "-o NAME.gguf"),
        (["-o", "a.gguf", "--types", "Q8_0", "--type", "Q4_0"], "-o NAME.gguf"),
        (["-o", "there.gguf"], "already exists"),
        (["-o", "a.gguf", "--format", "dense"], "gguf for a file"),
    ],
)
def test_refused_before_any_work(words, message, here, capsys):
    (here / "there.gguf").write_bytes(b"x")
    assert call(["export", "attar:tiny", *words]) in (1, 2)
    assert message in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["there.gguf"]


def test_a_link_in_place_of_the_hidden_folder_is_not_followed(here, capsys):
    (here / "victim").mkdir()
    (here / "victim" / "file").write_text("mine")
    (here / ".a.gguf.folder").symlink_to(here / "victim")
    assert call(["export", "attar:tiny", "-o", "a.gguf", "--type", "Q8_0", "--no-check"]) == 1
    assert "no folder of attar's" in capsys.readouterr().err
    assert [path.name for path in (here / "victim").iterdir()] == ["file"]


def test_a_type_of_gguf_given_as_a_scheme_points_to_export(here, capsys):
    assert call(["quantize", "attar:tiny", "-o", "q", "--scheme", "q4_k_m"]) == 2
    assert "attar export MODEL -o NAME.gguf --type Q4_K_M" in capsys.readouterr().err


@pytest.mark.slow
def test_w4_is_w4a16(here):
    words = ["--scheme", "w4", "--method", "rtn", "--check-tokens", "0"]
    assert call(["quantize", "attar:tiny", "-o", "q", *words]) == 0
    assert open_checkpoint(here / "q").card.settings["scheme"] == "W4A16"
