"""What a client of ``attar mcp`` may name: nothing outside of the folders, however it is spelled."""

import os
import shutil
from pathlib import Path

import pytest

from attar.checkpoint.paths import EMBEDDED_FOLDER
from attar.errors import AttarError, UsageError
from attar.mcp.folders import Folders


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two folders; outside of them a secret, and links to it."""
    first, second, outside = (tmp_path / name for name in ("first", "second", "outside"))
    for folder in (first / "model", second, outside / "model"):
        folder.mkdir(parents=True)
    for folder in (first / "model", outside / "model"):
        (folder / "config.json").write_text("{}")
    (outside / "secret.txt").write_text("secret")
    (first / "text.txt").write_text("words")
    (first / "link").symlink_to(outside / "model")
    (first / "file.txt").symlink_to(outside / "secret.txt")
    (first / "linked").mkdir()
    (first / "linked" / "config.json").symlink_to(outside / "model" / "config.json")
    (first / "alias").symlink_to(first / "model")
    (first / "one.gguf").write_text("GGUF")
    monkeypatch.chdir(first)
    monkeypatch.setenv("HOME", str(outside))
    return Folders.of([str(first), str(second)], hub=False)


OUTSIDE = [
    "..",
    "../outside/model",
    "model/../../outside/model",
    "link",
    "link/config.json",
    "linked",
    "/etc",
    "/",
    "~",
    "~/model",
    "./../outside",
    "s3://bucket/model",
    "hf://org/name",
    "org/name",
    "org/name@main",
    "",
    "  ",
    "a\0b",
    "attar:../../etc",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_model_outside_is_refused(folders, name):
    try:
        path = Path(folders.model(name))
    except UsageError as error:
        assert "\n" not in error.message
    else:  # a name of nothing, inside
        assert path.is_relative_to(folders.roots[0]) and not path.exists(), path


def test_what_is_inside_is_a_path(folders, tmp_path):
    first, second = folders.roots
    assert folders.model("model") == str(first / "model")
    assert folders.model("alias") == str(first / "alias")
    assert folders.model(str(first / "model")) == str(first / "model")
    assert folders.model("../second") == str(second)
    assert folders.model("one.gguf") == str(first / "one.gguf")
    assert folders.model("attar:tiny") == "attar:tiny"
    assert folders.output("new/deep") == first / "new" / "deep"


def test_parts_of_a_single_file_are_inside_too(folders, tmp_path):
    (folders.roots[0] / "two.gguf").symlink_to(tmp_path / "outside" / "secret.txt")
    with pytest.raises(UsageError, match="links out"):
        folders.model("one.gguf")


@pytest.mark.parametrize("name", ["", ".", "..", "../second", "link/new", "/tmp/new", "s3://b/x", "~/new"])
def test_an_output_is_a_new_folder_inside(folders, name):
    with pytest.raises(UsageError):
        folders.output(name)


BAD = [
    {"data": "../outside/secret.txt"},
    {"data": "whole:/etc/passwd"},
    {"data": "whole:../outside/secret.txt:text"},
    {"data": "file.txt"},
    {"data": "linked"},
    {"data": "link"},
    {"data": "~/secret.txt"},
    {"tasks": ["arc_easy", "/etc/tasks.yaml"]},
    {"overrides": {"/etc/passwd": 1}},
    {"config": "models:\n  - model: '/etc/model'\n"},
    {"config": 'models:\n  - model: "..\\x2foutside"\n', "escaped": "../outside"},
    {"data": "https://host/x"},
    {"data": "text.txt,/etc/passwd"},
]


@pytest.mark.parametrize("settings", BAD, ids=str)
def test_settings_that_name_what_is_outside_are_refused(folders, settings):
    with pytest.raises(UsageError):
        folders.check(settings)


def test_other_settings_pass(folders):
    folders.check({"scheme": "W4A16", "bits": 4.5, "data": "text.txt", "ignore": ["re:.*proj"], "x": None})
    folders.check({"data": "whole:text.txt", "seed": 3, "overrides": {"model.layers.0.*": "W8A16"}})


RECIPES = {
    "model": "model: /etc/model\nstages: []\n",
    "escape": 'model: "..\\x2foutside\\x2fmodel"\nstages: []\n',
    "data": "model: attar:tiny\ndata: ../outside/secret.txt\nstages: []\n",
    "stage": "model: attar:tiny\nstages: [{stage: recover, teacher: /etc/model}]\n",
    "anchor": "x: &x ../outside/model\nmodel: *x\nstages: []\n",
    "merge": "model: attar:tiny\nstages: [{stage: merge, config: 'models:\n\n  - model: /etc/m'}]\n",
    "file": "model: attar:tiny\nstages: [{stage: merge, config: bad.txt}]\n",
    "linked": "model: attar:tiny\nstages: [{stage: merge, config: near.txt}]\n",
    "sibling": "model: attar:tiny\nstages: [{stage: merge, config: sub.txt}]\n",
    "not yaml": "model: [",
}


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_names_nothing_outside(folders, name):
    deep = folders.roots[0] / "recipes"
    deep.mkdir()
    (folders.roots[0] / "bad.txt").write_text("models: [{model: ../outside/model}]\n")
    (deep / "sub.txt").write_text("models: [{model: ../../outside/model}]\n")
    (deep / "near.txt").symlink_to(folders.roots[0].parent / "outside" / "secret.txt")
    (deep / "recipe.yaml").write_text(RECIPES[name])
    with pytest.raises(AttarError):
        folders.recipe("recipes/recipe.yaml")


def test_a_recipe_inside_is_its_path(folders):
    path = folders.roots[0] / "recipe.yaml"
    path.write_text("# see /etc and ../docs\nmodel: attar:tiny\nstages: [{stage: quantize}]\n")
    assert folders.recipe("recipe.yaml") == path
    with pytest.raises(UsageError, match="no such recipe"):
        folders.recipe("model")
    path.write_text("#" * (2**20 + 1))
    with pytest.raises(UsageError, match="at most 1 MiB"):
        folders.recipe("recipe.yaml")


def test_the_hub_is_open_where_the_server_was_started_so(folders):
    opened = Folders(folders.roots, hub=True)
    assert [opened.model(name) for name in ("org/name", "hf://org/name")] == ["org/name", "hf://org/name"]
    with pytest.raises(UsageError):
        opened.model("s3://bucket/x")


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        Folders.of([str(tmp_path / "none")], hub=False)


def test_a_copy_of_a_model_is_a_model(folders):
    shutil.copytree(EMBEDDED_FOLDER / "tiny", folders.roots[1] / "tiny")
    assert os.path.isdir(folders.model("../second/tiny"))  # noqa: PTH112
