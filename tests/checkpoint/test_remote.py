"""Models in a store: downloads that go on, uploads in order, what is refused. The store is in memory."""

import json

import fsspec
import pytest

from attar.checkpoint import atomic, remote
from attar.checkpoint.card import Card
from attar.checkpoint.hashing import sha256_file
from attar.checkpoint.open import open_checkpoint
from attar.deployment.settings import ExportSettings
from attar.errors import CheckpointError, MissingExtraError, OutputError, UsageError
from attar.verbs import run_stage, upload
from tests.flushes import record_flushes
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

    files = {path.name: sha256_file(path) for path in model.iterdir()}
    Card(name="base", stage="prune", files=files).write(model)
    (model / ".env").write_text("TOKEN=1")
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    remote.upload(model, "hf://org/name@dev")
    assert [name for name, _ in calls] == ["create_repo", "upload_folder", "upload_file"]
    assert (
        sorted(calls[1][1]["allow_patterns"]) == sorted(files) and calls[2][1]["path_in_repo"] == "attar.json"
    )
    assert {options["revision"] for _, options in calls[1:]} == {"dev"}


@pytest.mark.parametrize("form", ["absolute", "relative", "exact hash"])
def test_a_card_in_a_store_reaches_no_file_outside_the_download(store, model, tmp_path, form):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    name = str(victim) if form != "relative" else "../" * 12 + str(victim)[1:]
    digest = sha256_file(victim) if form == "exact hash" else "0"
    content = Card(name="m", stage="prune").to_dict() | {"files": {name: digest}}
    (model / "attar.json").write_text(json.dumps(content))
    put(store, model)
    with pytest.raises(CheckpointError, match="names of files below the folder"):
        open_checkpoint(ADDRESS)
    assert victim.read_text() == "mine"


def test_only_files_of_the_listing_are_compared(store, tmp_path):
    checkpoint = run_stage("export", "attar:tiny", tmp_path / "out", _export())
    card = checkpoint.card
    put(store, checkpoint.path)
    more = {"head/config.json": "0", "onnx.bin": "0"}
    content = card.to_dict() | {"files": card.files | more}
    store.pipe_file("/bucket/models/small/attar.json", json.dumps(content).encode())
    assert open_checkpoint(ADDRESS).fingerprint() == checkpoint.fingerprint()


@pytest.mark.parametrize("name", ["a\\b.json", "a\nb.json", "\x1b[2J.json", "x" * 250 + ".json"])
def test_a_listings_name_that_is_no_file_name_is_refused(store, model, name):
    put(store, model)
    store.pipe_file(f"/bucket/models/small/{name}", b"{}")
    with pytest.raises(CheckpointError, match="is not the name of a file"):
        open_checkpoint(ADDRESS)


@pytest.mark.parametrize("size", [-1, None, "7", 1.5])
def test_a_listings_size_is_a_whole_number(store, model, monkeypatch, size):
    put(store, model)
    listing = store.find("/bucket/models/small", maxdepth=1, detail=True)
    listing = {path: info | {"size": size} for path, info in listing.items()}
    monkeypatch.setattr(type(store), "find", lambda self, *words, **options: listing)
    with pytest.raises(CheckpointError, match="gives it a size of"):
        open_checkpoint(ADDRESS)


def test_a_model_larger_than_the_disk_is_refused_before_it_is_fetched(store, model, monkeypatch):
    put(store, model)
    log = flaky(monkeypatch, store, 1000).log
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 100)
    with pytest.raises(OutputError, match=r"no space left .*\(.* needed, 100 B free\)") as caught:
        open_checkpoint(ADDRESS)
    assert log == [] and "XDG_CACHE_HOME" in caught.value.hint


def interrupted(store, model, monkeypatch, calls=3):
    """A download that ended: the partial file of the weights."""
    put(store, model)
    monkeypatch.setattr(remote, "CHUNK", 100)
    with monkeypatch.context() as context:
        flaky(context, store, calls)
        with pytest.raises(CheckpointError, match="ConnectionResetError"):
            open_checkpoint(ADDRESS)
    partials = sorted(remote._cache(ADDRESS).rglob(".*.partial"))
    assert len(partials) == 1
    return partials[0]


DAMAGES = {
    "a wrong byte": lambda data: b"\xff" + data[1:],
    "lost bytes": lambda data: bytes(len(data)),
    "bytes behind": lambda data: data + b"behind",
    "shorter": lambda data: data[:-1],
    "longer than the file": lambda data: data + bytes(100_000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_partial_file_becomes_no_file(store, model, monkeypatch, damage):
    partial = interrupted(store, model, monkeypatch)
    partial.write_bytes(DAMAGES[damage](partial.read_bytes()))
    checkpoint = open_checkpoint(ADDRESS)
    assert {path.name: path.read_bytes() for path in checkpoint.path.iterdir()} == {
        path.name: path.read_bytes() for path in model.iterdir()
    }


@pytest.mark.parametrize("record", ["", "{}", '{"bytes": 10}', '{"bytes": -5, "sha256": ""}', "missing"])
def test_a_partial_file_without_its_record_is_fetched_again(store, model, monkeypatch, record):
    partial = interrupted(store, model, monkeypatch)
    path = partial.with_name(partial.name.replace(".partial", ".received"))
    path.unlink() if record == "missing" else path.write_text(record)
    assert open_checkpoint(ADDRESS).fingerprint() == open_checkpoint(model).fingerprint()


@pytest.mark.parametrize("surplus", [b"", b"more"])
def test_a_store_that_sends_other_lengths_than_it_lists_is_refused(store, model, monkeypatch, surplus):
    put(store, model)
    real = type(store).cat_file

    def cat_file(self, path, start=None, end=None):
        return real(self, path, start=start, end=end) + surplus if surplus else b""

    monkeypatch.setattr(type(store), "cat_file", cat_file)
    with pytest.raises(CheckpointError, match="is longer than" if surplus else "ends after 0 of"):
        open_checkpoint(ADDRESS)
    assert not [path for path in remote._cache(ADDRESS).rglob("*.json") if not path.name.startswith(".")]


def test_a_file_that_this_disk_damaged_is_fetched_again_once(store, monkeypatch, tmp_path):
    checkpoint = run_stage("export", "attar:tiny", tmp_path / "out", _export())
    put(store, checkpoint.path)
    copy = open_checkpoint(ADDRESS).path
    for name in ("model.safetensors", "tokenizer.json"):
        (copy / name).write_bytes(b"\0" * (copy / name).stat().st_size)
    atomic.hidden(copy, "verified").unlink()
    log = flaky(monkeypatch, store, 1000).log
    assert open_checkpoint(ADDRESS).fingerprint() == checkpoint.fingerprint()
    assert {name for _, name, _ in log} == {str(path) for path in ("model.safetensors", "tokenizer.json")}


def test_each_block_is_on_the_disk_before_its_record_and_the_file_before_its_name(store, model, monkeypatch):
    put(store, model)
    monkeypatch.setattr(remote, "CHUNK", 300)
    events = record_flushes(monkeypatch)
    folder = open_checkpoint(ADDRESS).path
    final = folder / "model.safetensors"
    partial, received = (atomic.hidden(final, suffix) for suffix in ("partial", "received"))
    blocks = -(-(model / "model.safetensors").stat().st_size // 300)
    mine = [
        (kind, path) for kind, path in events if path in (partial, received, folder / "model.safetensors")
    ]
    each = [("flush", partial), ("rename", received)]
    assert blocks > 2 and mine == [
        *each * blocks,
        ("flush", partial),
        ("rename", folder / "model.safetensors"),
    ]
    assert events[events.index(mine[-1]) + 1] == ("flush", folder)


@pytest.mark.parametrize("card", [True, False])
def test_only_the_models_files_are_uploaded(store, model, tmp_path, caplog, card):
    (tmp_path / "secret.txt").write_text("secret")
    if card:
        model = run_stage("export", "attar:tiny", tmp_path / "out", _export()).path
    expected = {path.name for path in model.iterdir()}
    (model / "notes.txt").symlink_to("../secret.txt")
    (model / ".env").write_text("TOKEN=1")
    upload(model, ADDRESS)
    assert {path.rpartition("/")[2] for path in store.find("/bucket")} == expected
    assert "not uploaded" in caplog.text and ".env, notes.txt" in caplog.text


@pytest.mark.parametrize("name", ["model.safetensors", "README.md", "LICENSE", "config.json"])
def test_a_file_of_the_model_that_is_a_link_to_elsewhere_is_not_uploaded(store, model, tmp_path, name):
    other = tmp_path / "elsewhere"
    content = (model / name).read_bytes() if (model / name).exists() else b"secret"
    other.write_bytes(content)
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(other)
    with pytest.raises(CheckpointError, match="is a link to"):
        upload(model, ADDRESS)
    assert not store.find("/bucket")


def test_a_file_that_is_not_the_cards_is_not_uploaded(store, tmp_path):
    checkpoint = run_stage("export", "attar:tiny", tmp_path / "out", _export())
    (checkpoint.path / "README.md").write_text("my words")
    upload(checkpoint.path, ADDRESS)
    (checkpoint.path / "generation_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is not the file that its attar\.json lists"):
        upload(checkpoint.path, ADDRESS + "2")
    (checkpoint.path / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        upload(checkpoint.path, ADDRESS + "2")
    assert not store.exists("/bucket/models/small2/config.json")


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"more", lambda data: b""])
def test_a_file_of_another_size_than_the_listings_is_fetched_again(store, model, monkeypatch, change):
    put(store, model)
    path = open_checkpoint(ADDRESS).path / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    log = flaky(monkeypatch, store, 1000).log
    assert open_checkpoint(ADDRESS).fingerprint() == open_checkpoint(model).fingerprint()
    assert {name for _, name, _ in log} == {"model.safetensors"}


def test_an_upload_that_the_store_has_in_another_size_is_an_error(store, model, monkeypatch):
    real = type(store).put_file

    def put_file(self, local, target, **options):
        real(self, local, target, **options)
        self.pipe_file(target, self.cat_file(target)[:-1])

    monkeypatch.setattr(type(store), "put_file", put_file)
    with pytest.raises(OutputError, match=r"model.safetensors: has \d+ bytes, not \d+"):
        upload(model, ADDRESS)
