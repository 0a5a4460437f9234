"""Names from outside that become paths, and links in a model's folder."""

import json
import os
import shutil

import pytest

from attar.checkpoint.atomic import target
from attar.checkpoint.card import Card
from attar.checkpoint.companions import copy_companions, model_files
from attar.checkpoint.names import LONGEST, check_links, is_file_name, is_relative_name
from attar.checkpoint.open import open_checkpoint
from attar.deployment.settings import ExportSettings
from attar.errors import CheckpointError
from attar.recipe.runfolder import Receipt, own_folders, read_receipt, write_receipt
from attar.verbs import run_stage
from tests.recipe.recipe_fakes import make_model

PATHS = [
    "",
    ".",
    "..",
    "/etc/passwd",
    "a/../../b",
    "../b",
    "a\\b",
    "a\0b",
    "a\nb",
    "a//b",
    "a/",
    "~/x\x1b[2J",
]
PATHS += ["é" * LONGEST, ".config.json.partial", ".out.work", "a/.b.lock", "x\u202ey", "x\udc80", ".m.rank-1"]
NAMES = ["config.json", "model-00001-of-00002.safetensors", "é.txt", "a b", "a" * LONGEST, ".gitattributes"]


@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_no_name(name, tmp_path):
    assert not is_relative_name(name)
    with pytest.raises(CheckpointError, match=r"files is .* names of files below the folder"):
        Card.from_dict(Card(name="m", stage="prune", files={name: "0"}).to_dict())
    folder = make_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    index = json.dumps({"weight_map": {"a": "nested/" + name, "b": name}})
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"which is not a file name|surrogate"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_files_are_names(name):
    assert is_file_name(name) and is_relative_name(f"head/{name}") and not is_file_name(f"head/{name}")
    card = Card(name="m", stage="prune", files={f"head/{name}": "0"})
    assert Card.from_dict(card.to_dict()) == card


@pytest.mark.parametrize("wrong", [None, 3, [], ["a"], {"a": 1}, b"a", True])
def test_what_is_no_text_is_no_name(wrong):
    assert not is_file_name(wrong) and not is_relative_name(wrong)


@pytest.mark.parametrize("change", [{"files": {"../x": 3}}, {"files": 3}, {"files": {"x": "3"}}, {"key": 3}])
def test_a_receipt_with_other_fields_is_none(tmp_path, change):
    receipt = Receipt(key="k", finished=True, files={"config.json": 3})
    write_receipt(tmp_path, "01", receipt)
    assert read_receipt(tmp_path, "01") == receipt
    path = tmp_path / "receipts" / "01.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert read_receipt(tmp_path, "01") is None


@pytest.mark.parametrize("folders", [["../x", "/etc", "01-prune", "a\0b", ".git", 3], 3, None, {"..": 1}])
def test_a_run_owns_folders_below_it_alone(tmp_path, folders):
    (tmp_path / "run.json").write_text(json.dumps({"attar": "1", "folders": folders}))
    assert set(own_folders(tmp_path)) <= {"01-prune", "3"}


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_text("secret")
    return path


@pytest.mark.parametrize("name", ["LICENSE", "tokenizer.json", "chat_template.jinja", "added_tokens.json"])
@pytest.mark.parametrize("kind", ["dense", "gguf"])
def test_a_companion_that_is_a_link_out_of_the_folder_is_not_copied(tmp_path, secret, name, kind):
    model = shutil.copytree(open_checkpoint("attar:tiny").path, tmp_path / "model")
    secret.write_bytes((model / name).read_bytes() if (model / name).exists() else b"{}")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to("../home/id_rsa")
    with pytest.raises(CheckpointError, match=rf"{name}: is a link to .*id_rsa, outside"):
        run_stage("export", model, tmp_path / "out", ExportSettings(format=kind))
    (tmp_path / "target").mkdir()
    with pytest.raises(CheckpointError, match="is a link"):
        copy_companions(model, tmp_path / "target")
    assert not (tmp_path / "out").exists() and not list((tmp_path / "target").iterdir())


def test_a_folder_of_companions_that_is_a_link_is_refused(tmp_path, secret):
    (tmp_path / "model").mkdir()
    (secret.parent / "id_rsa.jinja").write_text("secret")
    (tmp_path / "model" / "additional_chat_templates").symlink_to("../home")
    with pytest.raises(CheckpointError, match="is a link"):
        copy_companions(tmp_path / "model", tmp_path)


def test_links_of_the_hubs_cache_and_within_the_folder_are_the_models(tmp_path, secret):
    cache = tmp_path / "models--org--m"
    snapshot = cache / "snapshots" / "0123"
    for folder in (snapshot, cache / "blobs", tmp_path / "copy"):
        folder.mkdir(parents=True)
    (cache / "blobs" / "abc").write_text("text")
    (snapshot / "LICENSE").symlink_to("../../blobs/abc")
    (snapshot / "NOTICE").symlink_to("LICENSE")
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    for folder in (snapshot, link):
        assert copy_companions(folder, tmp_path / "copy") == ["LICENSE", "NOTICE"]
    (cache / "blobs").rename(tmp_path / "other")
    (cache / "blobs").symlink_to(secret.parent)
    (secret.parent / "abc").write_text("secret")
    with pytest.raises(CheckpointError, match="is a link"):
        copy_companions(snapshot, tmp_path / "copy")
    with pytest.raises(CheckpointError):
        check_links(snapshot, ["LICENSE"])


def test_the_files_of_a_model_without_a_card(tmp_path):
    names = ["config.json", "model.safetensors", "LICENSE", "README.md", "1_Pooling/config.json"]
    others = [".env", "notes.txt", "credentials.json", ".git/config.json", "id_rsa", "train.py"]
    for name in (*names, *others):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert model_files(tmp_path) == sorted(names)


def test_an_outputs_name_leaves_room_for_hidden_names(tmp_path):
    assert len(os.fsencode(target(tmp_path / ("a" * LONGEST)).name)) == LONGEST
