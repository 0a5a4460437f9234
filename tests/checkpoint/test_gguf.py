"""A file that holds a whole model, where a folder is usually given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import attar
from attar.checkpoint import produce
from attar.checkpoint.card import Card
from attar.checkpoint.inspect import inspect
from attar.checkpoint.lineage import as_parent
from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.output import command_line
from attar.checkpoint.parts import part_of
from attar.checkpoint.paths import resolve
from attar.errors import CheckpointError, ModelError, OutputError
from attar.formats.gguf.container import read_gguf
from attar.formats.gguf.provenance import provenance_config, provenance_metadata
from tests import tiny_models
from tests.formats.gguf.gguf_files import write_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_models.save(tiny_models.build("llama2"), tmp_path / "dense", dtype=torch.bfloat16)


@pytest.fixture
def file(folder: Path, tmp_path: Path) -> Path:
    extra = {"tokenizer.chat_template": "{%\n" + "x" * 200, "general.tags": [str(i) for i in range(9)]}
    return write_gguf(folder, tmp_path / "m.gguf", "Q8_0", extra=extra)


def test_a_path_to_a_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve("m.gguf") == resolve(str(file)) == resolve(Path("./dense/../m.gguf")) == file.resolve()
    (tmp_path / "blob").write_bytes(file.read_bytes())
    (tmp_path / "link.gguf").symlink_to(tmp_path / "blob")  # as in the hub's cache
    assert resolve("link.gguf").name == "link.gguf" and open_checkpoint("link.gguf").name == "link"
    (tmp_path / "LOUD.GGUF").write_bytes(file.read_bytes())
    assert open_checkpoint("LOUD.GGUF").name == "LOUD"
    with pytest.raises(CheckpointError, match="no such model folder") as caught:
        resolve(tmp_path / "mm.gguf")
    assert caught.value.hint == f"did you mean {file}?"


def test_the_fingerprint_is_that_of_the_bytes(file: Path, folder: Path, tmp_path: Path) -> None:
    first = open_checkpoint(file).fingerprint()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    (tmp_path / "other").mkdir()
    copy = tmp_path / "other" / "m.gguf"
    copy.write_bytes(file.read_bytes())
    assert open_checkpoint(copy).fingerprint() == first
    copy.write_bytes(data)
    assert open_checkpoint(copy).fingerprint() != first
    assert open_checkpoint(folder).source == folder.resolve()


def test_counts_are_those_of_the_model(file: Path, folder: Path) -> None:
    dense, actual = inspect(folder), inspect(file)
    assert actual.parameters == dense.parameters and actual.tied == dense.tied
    assert [(part.name, part.parameters) for part in actual.parts] == [
        (part.name, part.parameters) for part in dense.parts
    ]
    assert actual.tensor_bytes == sum(tensor.nbytes for tensor in read_gguf(file).tensors.values())
    assert actual.disk_bytes == file.stat().st_size and actual.path == file and actual.weight_files == 1
    matrices = sum(part.parameters for part in dense.parts if part.name != "norm")
    assert actual.quantization is not None and actual.quantization["parameters"] == matrices
    assert actual.quantization["bits_per_weight"] == 8.5
    # blocks name no number type: keys and values are those of the dense model that is made of them
    assert actual.geometry == dense.geometry and actual.dtype == "bfloat16"


def test_what_made_tensors_and_tied_heads_count(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    for name, family, changes in (
        ("a", "llama3", {"rope_parameters": rope}),
        ("b", "gpt2", {}),
        ("c", "gpt_neox", {}),
    ):
        folder = tiny_models.save(tiny_models.build(family, **changes), tmp_path / name, dtype=torch.float16)
        file = write_gguf(folder, tmp_path / f"{name}.gguf")
        dense, actual = inspect(folder), inspect(file)
        assert actual.parameters == dense.parameters, family
        assert actual.quantization is None and actual.container is not None
        assert actual.container["file_type"] == "F16"


def test_the_text(file: Path) -> None:
    lines = inspect(file).render().splitlines()
    assert max(map(len, lines)) <= 100
    facts = [line.split() for line in lines]
    assert ["file", str(file)] in facts
    assert "quantized   Q8_0 (gguf): 23 tensors at 8.50 bits" in [line.strip() for line in lines]
    start = lines.index("GGUF version 3, Q8_0")
    assert facts[start + 1] == ["type", "parameters", "tensors", "bytes", "bits/weight"]
    assert [row[0] for row in facts[start + 2 : start + 4]] == ["Q8_0", "F32"]
    assert facts[start + 2][-1] == "8.50" and facts[start + 3][-1] == "32.00"
    keys = {row[0]: " ".join(row[1:]) for row in facts[lines.index("Metadata") + 1 :]}
    assert keys["llama.block_count"] == "3" and keys["general.tags"] == "9 of str"
    assert keys["llama.attention.layer_norm_rms_epsilon"] == "1e-06"
    assert keys["tokenizer.chat_template"].startswith(r"{%\nxxx")
    assert keys["tokenizer.chat_template"].endswith("…")


def test_the_json(file: Path) -> None:
    content = json.loads(json.dumps(inspect(file).to_dict()))
    container = content["container"]
    assert (container["format"], container["version"], container["files"]) == ("GGUF", 3, [str(file)])
    assert container["types"][0] | {"parameters": 0, "bytes": 0} == {
        "type": "Q8_0",
        "tensors": 23,
        "parameters": 0,
        "bytes": 0,
        "bits_per_weight": 8.5,
    }
    assert container["metadata"]["general.tags"] == {"kind": "[str]", "length": 9}
    assert container["metadata"]["general.architecture"] == "llama"
    assert content["quantization"]["format"] == "Q8_0" and content["path"] == str(file)


def test_a_folder_has_no_container(folder: Path) -> None:
    assert inspect(folder).container is None
    assert "folder" in inspect(folder).render()


def test_an_unknown_architecture_is_shown_all_the_same(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.build("qwen3"), tmp_path / "q", dtype=torch.float16)
    file = write_gguf(folder, tmp_path / "q.gguf")
    file.write_bytes(file.read_bytes().replace(b"qwen3", b"qwen9"))
    with pytest.raises(ModelError, match=r"q\.gguf: attar cannot read GGUF's architecture 'qwen9'"):
        open_checkpoint(file)
    actual, known = inspect(file), inspect(folder)
    assert (actual.model_type, actual.parameters) == ("qwen9", known.parameters)
    assert actual.geometry == known.geometry and actual.path == file
    assert "GGUF version 3, F16" in actual.render()


def test_the_licence_of_a_file(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(folder, tmp_path / "m.gguf", extra={"general.license": "apache-2.0"})
    assert as_parent(open_checkpoint(file), "weights").licence["ids"] == ["apache-2.0"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("front", "ids"),
    [
        ("license: mit", ["mit"]),
        ("license: llama3.2\nbase_model: meta-llama/Llama-3.2-1B", ["llama3.2"]),
        ("license: [mit, gemma]", ["mit", "gemma"]),
        ("license: nobody-knows", ["unknown"]),
    ],
)
def test_a_file_without_its_card_keeps_licences_and_origins(front, ids, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "README.md").write_text(f"---\n{front}\n---\n")
    out = tmp_path / "out" / "x.gguf"
    attar.export(tmp_path / "m", out, format="gguf", type="F16", imatrix="none")
    alone = tmp_path / "alone.gguf"
    shutil.copyfile(out, alone)
    opened = open_checkpoint(alone)
    assert opened.card is None
    assert as_parent(opened, "weights").licence["ids"] == ids


def test_keys_of_origins_come_back() -> None:
    keys = provenance_metadata(["mit", "gemma"], ["org/one", "org/two"])
    assert keys["general.license"] == "other" and keys["general.base_model.1.name"] == "two"
    assert provenance_config(keys) == {
        "license": ["other", "mit", "gemma"],
        "base_model": ["org/one", "org/two"],
    }
    assert provenance_config(provenance_metadata(["mit"], ["org/one"])) == {
        "license": "mit",
        "base_model": "org/one",
    }
    senseless = {"general.license": 3, "general.license.name": 4, "general.base_model.count": 10**9}
    assert provenance_config({**senseless, "general.base_model.0.repo_url": 5}) == {}


def test_commands_and_outputs_name_the_file(file: Path, tmp_path: Path) -> None:
    opened = open_checkpoint(file)
    command = command_line("export", {}, [(opened, "weights")], tmp_path / "out")
    assert command.startswith(f"attar export {file} -o out")
    Card(name="x", stage="export").write(tmp_path)
    refused = pytest.raises(OutputError, match="contains the input model")
    with refused, produce(tmp_path, "export", {}, 1, [opened], force=True):
        pass
    assert file.is_file()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("token_embd.weight", "embedding"),
        ("position_embd.weight", "embedding"),
        ("output.weight", "head"),
        ("output_norm.weight", "norm"),
        ("blk.0.attn_q.weight", "attention"),
        ("blk.0.attn_qkv.bias", "attention"),
        ("blk.0.attn_output.weight", "attention"),
        ("blk.0.attn_q_norm.weight", "norm"),
        ("blk.0.post_ffw_norm.weight", "norm"),
        ("blk.0.ffn_down.weight", "mlp"),
        ("rope_freqs.weight", "other"),
    ],
)
def test_parts_by_the_names_of_llama_cpp(name: str, part: str) -> None:
    assert part_of(name) == part
