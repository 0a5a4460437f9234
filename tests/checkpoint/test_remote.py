"""Models in a store: downloads that go on, uploads in order, what is refused. The store is in memory."""

import json

import fsspec
import pytest

from attar.checkpoint import remote
from attar.checkpoint.open import open_checkpoint
from attar.deployment.settings import ExportSettings
from attar.errors import CheckpointError, MissingExtraError, OutputError, UsageError
from attar.verbs import run_stage, upload
from tests.recipe.recipe_fakes import make_model

ADDRESS = "memory://bucket/models/small"


class Flaky:
    """A store that ends after some calls."""

    def __init__(self, store, calls):
        self._store, self.calls, self.log = store, calls, []

    def __getattr__(self, name):
        value = getattr(self._store, name)
        if name not in ("cat_file", "put_file"):
            return value

        def counted(*words, **options):
            if not self.calls:
                raise ConnectionResetError("gone")
            self.calls -= 1
            self.log.append((name, str(words[-1]).rpartition("/")[2], options.get("start")))
            return value(*words, **options)

        return counted


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setattr(remote, "STORES", ("s3", "memory"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    return memory


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "base")


def flaky(monkeypatch, store, calls):
    wrapped = Flaky(store, calls)
    monkeypatch.setattr(remote, "_open", lambda address: (wrapped, address.removeprefix("memory:/")))
    return wrapped


def put(store, model, address=ADDRESS):
    for path in model.iterdir():
        store.pipe_file(f"{address.removeprefix('memory:/')}/{path.name}", path.read_bytes())


def test_a_model_is_opened_by_its_address(store, model):
    put(store, model)
    store.pipe_file("/bucket/models/small/pytorch_model.bin", b"a pickle")
    store.pipe_file("/bucket/models/small/onnx/model.safetensors", b"another format")
    checkpoint = open_checkpoint(ADDRESS)
    assert checkpoint.name == checkpoint.spelling == ADDRESS
    assert checkpoint.fingerprint() == open_checkpoint(model).fingerprint()
    assert not (checkpoint.path / "pytorch_model.bin").exists() and not (checkpoint.path / "onnx").exists()


def test_a_download_goes_on_at_its_byte_and_is_not_repeated(store, model, monkeypatch):
    put(store, model)
    monkeypatch.setattr(remote, "CHUNK", 500)
    first = flaky(monkeypatch, store, 3)
    with pytest.raises(CheckpointError, match="ConnectionResetError: gone"):
        open_checkpoint(ADDRESS)
    second = flaky(monkeypatch, store, 1000)
    checkpoint = open_checkpoint(ADDRESS)
    assert checkpoint.fingerprint() == open_checkpoint(model).fingerprint()
    assert len(set(first.log + second.log)) == len(first.log + second.log)
    third = flaky(monkeypatch, store, 0)
    open_checkpoint(ADDRESS)
    assert third.log == []


def test_another_content_is_another_copy(store, model, tmp_path):
    put(store, model)
    one = open_checkpoint(ADDRESS)
    put(store, make_model(tmp_path / "other", 2.0))
    two = open_checkpoint(ADDRESS)
    assert one.path != two.path and one.fingerprint() != two.fingerprint()


def _export():
    return ExportSettings(format="dense")


def test_a_result_is_uploaded_with_its_card_last(store, monkeypatch, tmp_path):
    log = flaky(monkeypatch, store, 1000).log
    local = run_stage("export", "attar:tiny", tmp_path / "out", _export())
    run_stage("export", "attar:tiny", ADDRESS, _export())
    sent = [name for call, name, _ in log if call == "put_file"]
    assert sent[-2:] == ["config.json", "attar.json"] and "model.safetensors" in sent
    assert open_checkpoint(ADDRESS).fingerprint() == local.fingerprint()
    with pytest.raises(OutputError, match="already exists"):
        run_stage("export", "attar:tiny", ADDRESS, _export())


def test_an_upload_goes_on_and_sends_no_file_twice(store, model, monkeypatch, tmp_path):
    checkpoint = run_stage("export", "attar:tiny", tmp_path / "out", _export())
    first = flaky(monkeypatch, store, 3)
    with pytest.raises(OutputError, match="ConnectionResetError"):
        upload(checkpoint.path, ADDRESS)
    assert not store.exists("/bucket/models/small/attar.json")
    flaky(monkeypatch, store, 1000)
    with pytest.raises(CheckpointError, match="config"):
        open_checkpoint(ADDRESS)
    second = flaky(monkeypatch, store, 1000)
    upload(checkpoint.path, ADDRESS)
    names = [name for call, name, _ in first.log + second.log if call == "put_file"]
    assert len(set(names)) == len(names) == sum(path.is_file() for path in checkpoint.path.iterdir())
    store.pipe_file("/bucket/models/small/config.json", b"{}")  # changed by another
    third = flaky(monkeypatch, store, 1000)
    upload(checkpoint.path, ADDRESS)
    assert [name for _, name, _ in third.log] == ["config.json"]
    assert open_checkpoint(ADDRESS).fingerprint() == checkpoint.fingerprint()


def test_a_failed_upload_names_the_verb_that_goes_on(store, monkeypatch):
    flaky(monkeypatch, store, 1)
    with pytest.raises(OutputError) as caught:
        run_stage("export", "attar:tiny", ADDRESS, _export())
    words = (caught.value.hint or "").split("attar upload ")[1].split()
    flaky(monkeypatch, store, 1000)
    upload(*words)
    assert open_checkpoint(ADDRESS).card.stage == "export"


def test_weights_that_are_not_those_of_the_card_are_refused(store, tmp_path):
    checkpoint = run_stage("export", "attar:tiny", tmp_path / "out", _export())
    weights = checkpoint.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    put(store, checkpoint.path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"is not the file that its attar.json lists"):
            open_checkpoint(ADDRESS)


def test_what_is_not_there_or_no_address_is_one_line(store, model, monkeypatch):
    with pytest.raises(CheckpointError, match="no model there"):
        open_checkpoint(ADDRESS)
    with pytest.raises(UsageError, match="is no address"):
        upload(model, "bucket/models")
    with pytest.raises(CheckpointError, match="no repository of the hub"):
        open_checkpoint("hf://only-one-part")
    with pytest.raises(OutputError, match="address in a store"):
        remote.check_local("s3://bucket/run")
    monkeypatch.setattr("fsspec.core.url_to_fs", _missing)
    with pytest.raises(MissingExtraError, match="s3fs"):
        open_checkpoint("s3://bucket/models")


def _missing(address):
    raise ImportError("Install s3fs to access S3")


def test_the_hub_gets_the_card_last(model, monkeypatch, tmp_path):
    calls = []

    class Api:
        def __getattr__(self, name):
            return lambda *words, **options: calls.append((name, options))

    (model / "attar.json").write_text(json.dumps({}))
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    remote.upload(model, "hf://org/name@dev")
    assert [name for name, _ in calls] == ["create_repo", "upload_folder", "upload_file"]
    assert calls[1][1]["ignore_patterns"] == ["attar.json"] and calls[2][1]["path_in_repo"] == "attar.json"
    assert {options["revision"] for _, options in calls[1:]} == {"dev"}
