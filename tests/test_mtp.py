"""What each verb makes of a multi-token prediction head: kept with the model, named where it stays dense, cut
with the model, or left out with a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.cli.main import call
from attar.data.packing import calibration_batches
from attar.data.sources import COMPRESSION
from attar.deployment import gguf
from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.metadata import metadata as described
from attar.formats.readers import Decoded
from attar.models.anatomy.discover import discover
from attar.models.hidden_states import recording_states
from attar.models.loading.fit import admit
from attar.models.loading.load import load_model, load_tokenizer
from attar.models.mtp_head import MtpHead, load_mtp_head
from attar.pruning.experts import prune as experts
from attar.quantization import mtp_rounding
from attar.quantization.grids import IntGrid
from attar.quantization.methods.rtn import rtn
from attar.quantization.plan import plan
from attar.quantization.settings import StorageSettings
from attar.verbs import distill, export, prune, quantize, recover
from tests import tiny_models, tiny_mtp

DATA = str(Path(json.__file__).parent)
TEXT: dict[str, Any] = {"data": DATA, "samples": 2, "sequence_length": 32}
PLAIN: dict[str, Any] = {"method": "rtn", "check_tokens": 0}
W4 = {**PLAIN, "scheme": "W4A16", "group_size": 32}
TRAIN: dict[str, Any] = {"data": DATA, "sequence_length": 32, "steps": 1, "batch_size": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """A tiny model of each form, with its head."""
    home = tmp_path_factory.mktemp("models")
    return {family: tiny_mtp.save(family, home / family) for family in tiny_mtp.HEADS}


def same_head(first: Checkpoint, second: Checkpoint) -> bool:
    """Whether two checkpoints have one head, bit for bit."""
    return first.mtp.keys() == second.mtp.keys() and all(
        torch.equal(first.load(name), second.load(name)) for name in first.mtp
    )


@pytest.mark.parametrize("family", tiny_mtp.HEADS)
def test_quantize_rounds_the_blocks_and_names_the_rest(family, models, tmp_path):
    source = open_checkpoint(models[family])
    written = quantize(source, tmp_path / "out", **W4)
    decoded = Decoded(written.with_mtp)
    named = written.config["quantization_config"]["ignore"]
    coded = 0
    for name, info in source.mtp.items():
        weight = source.load(name)
        if decoded.is_coded(name):
            wanted = rtn(weight, IntGrid(4, 32, storage=torch.float32)).dequantize()
            assert torch.equal(decoded.load(name), wanted)
            coded += 1
        else:
            assert torch.equal(decoded.load(name), weight)
            embedding = name.endswith("embed_tokens.weight")
            assert len(info.shape) != 2 or embedding or name.removesuffix(".weight") in named
    assert coded >= 7
    joint = next(name for name in source.mtp if info_of(source, name) == (64, 128))
    assert joint.removesuffix(".weight") in named and not decoded.is_coded(joint)


def info_of(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    """The shape of a head's tensor."""
    return tuple(checkpoint.mtp[name].shape)


def test_engines_find_their_own_names(models):
    """MiMo's and Ernie's layers have another number in vLLM, fused modules one name, SGLang's decoder too."""
    static = StorageSettings(scheme="FP8")  # nothing is known of the head's inputs
    ignore = {
        family: plan(open_checkpoint(models[family]), static).ignore for family in ("qwen2", "deepseek_v3")
    }
    assert {"model.mtp_layers.0.self_attn.q_proj", "model.layers.3.self_attn.qkv_proj"} < {*ignore["qwen2"]}
    deepseek = {*ignore["deepseek_v3"]}
    assert {"model.layers.3.self_attn.fused_qkv_a_proj", "model.decoder.mlp.experts.0.up_proj"} < deepseek
    assert not any(name.startswith("model.layers.2.mlp.experts") for name in deepseek)


def test_what_engines_fuse_shares_the_global_scale_of_nvfp4(models, tmp_path):
    rounded = quantize(models["qwen2"], tmp_path / "out", scheme="NVFP4A16", **PLAIN)
    block = tiny_mtp.block_name("qwen2", 3)
    for names in (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    ):
        scales = [float(rounded.load(f"{block}.{name}.weight_global_scale")) for name in names]
        assert len(set(scales)) == 1
        largest = max(
            float(open_checkpoint(models["qwen2"]).load(f"{block}.{name}.weight").abs().max())
            for name in names
        )
        assert scales[0] == pytest.approx(448 * 6 / largest, rel=1e-6)


def test_a_stack_of_experts_is_named_expert_by_expert():
    from attar.formats.dense_names import dense_names

    stacks = {"mtp.layers.0.mlp.experts.down_proj": torch.empty(2, 4, 4)}
    assert dense_names(stacks, (), {"num_hidden_layers": 1}) == [
        "mtp.layers.0.mlp.experts",
        "mtp.layers.0.mlp.experts.0.down_proj",
        "mtp.layers.0.mlp.experts.1.down_proj",
    ]


def test_ignore_holds_for_the_head_too(models):
    assert not plan(open_checkpoint(models["qwen2"]), StorageSettings(group_size=32, ignore=["re:mtp"])).mtp


def test_rotation_leaves_it_out(models, tmp_path, capsys):
    written = quantize(models["qwen2"], tmp_path / "out", rotate=True, untie=True, **W4)
    assert not written.mtp and written.config["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("format", ["gptq", "dense"])
def test_export_decodes_it_and_names_it(format, models, tmp_path):
    quantize(models["qwen3_next"], tmp_path / "coded", **W4)
    source = Decoded(open_checkpoint(tmp_path / "coded").with_mtp)
    written = export(tmp_path / "coded", tmp_path / "out", format=format)
    assert written.mtp.keys() == open_checkpoint(models["qwen3_next"]).mtp.keys()
    kind = torch.float16 if format == "gptq" else torch.float32
    assert all(torch.equal(written.load(name), source.load(name).to(kind)) for name in written.mtp)
    skipped = written.config.get("quantization_config", {}).get("dynamic", {})
    assert (r"-:^mtp\.fc$" in skipped) == (format == "gptq")


def test_export_of_modelopt_keeps_the_codes(models, tmp_path):
    quantize(models["glm4_moe"], tmp_path / "coded", **PLAIN, scheme="FP8_DYNAMIC")
    source, written = (
        Decoded(checkpoint.with_mtp)
        for checkpoint in (
            open_checkpoint(tmp_path / "coded"),
            export(tmp_path / "coded", tmp_path / "out", format="modelopt"),
        )
    )
    name = "model.layers.3.self_attn.o_proj.weight"
    assert written.is_coded(name) and torch.equal(written.load(name), source.load(name))


@pytest.mark.parametrize("family", ["glm4_moe", "qwen2"])
def test_pruned_layers_keep_it(family, models, tmp_path):
    source = open_checkpoint(models[family])
    written = prune(source, tmp_path / "out", method="layers", ratio=0.34, reconstruct="none", **TEXT)
    assert written.config["num_hidden_layers"] == 2
    numbered = {name.replace("layers.3.", "layers.2."): name for name in source.mtp}
    assert sorted(written.mtp) == sorted(numbered)
    assert all(torch.equal(written.load(name), source.load(old)) for name, old in numbered.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written.nbytes


def test_pruned_neurons_leave_it_out(models, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--ratio", "0.5", "--reconstruct", "none", "--data", DATA, "--samples", "2"]
    assert call(["prune", str(models["qwen2"]), "-o", str(out), "--method", "neurons", *options]) == 0
    assert "prediction head is left out: the model has other widths now" in capsys.readouterr().err
    assert not open_checkpoint(out).mtp and open_checkpoint(out).config["num_nextn_predict_layers"] == 0


def test_zeros_keep_it(models, tmp_path):
    written = prune(models["qwen2"], tmp_path / "out", method="magnitude", sparsity=0.5)
    assert same_head(open_checkpoint(models["qwen2"]), written)


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_its_experts_are_chosen_by_what_it_does(family, models, tmp_path):
    source = open_checkpoint(models[family])
    written = prune(source, tmp_path / "out", method="experts", experts=3, criterion="frequency", **TEXT)
    layers = written.card.details["layers"]
    chosen = [members[0] for members in layers[-1]["experts"]]
    assert layers[-1]["name"].startswith("head.") and layers[-1]["frequency_removed"] < 5 / 8
    block = tiny_mtp.block_name(family, 3)
    router = f"{block}.mlp.gate.weight"
    assert torch.equal(written.load(router), source.load(router)[chosen])
    for number, expert in enumerate(chosen):
        names = (f"{block}.mlp.experts.{one}.up_proj.weight" for one in (number, expert))
        assert torch.equal(written.load(next(names)), source.load(next(names)))
    assert f"{block}.mlp.experts.3.up_proj.weight" not in written.mtp


def test_experts_of_an_unknown_head_are_those_that_the_last_layer_keeps(models, tmp_path, monkeypatch):
    def refuse(source):
        raise ModelError("of a form unknown here")

    monkeypatch.setattr(experts, "load_mtp_head", refuse)
    source = open_checkpoint(models["glm4_moe"])
    written = prune(source, tmp_path / "out", method="experts", experts=3, criterion="cluster", **TEXT)
    kept = [members[0] for members in written.card.details["layers"][-1]["experts"]]
    router = "model.layers.3.mlp.gate.weight"
    assert torch.equal(written.load(router), source.load(router)[kept])


def test_recovered_and_distilled_models_keep_it(models, tmp_path):
    source = open_checkpoint(models["qwen2"])
    recovered = recover(source, tmp_path / "recovered", alpha=0.0, **TRAIN)
    student = distill(source, tmp_path / "student", keep_layers=0.67, **TRAIN)
    assert same_head(source, recovered) and same_head(source, student)
    assert student.config["num_hidden_layers"] == 2


def test_a_narrower_student_has_none(models, tmp_path):
    student = distill(models["qwen2"], tmp_path / "student", width=32, **TRAIN)
    assert not student.mtp and student.config["num_nextn_predict_layers"] == 0


def test_a_merge_keeps_that_of_its_first_model(models, tmp_path, capsys):
    other = tiny_models.save(tiny_models.build("qwen2", seed=1), tmp_path / "other")
    recipe = tmp_path / "merge.yml"
    parents = [{"model": str(folder)} for folder in (models["qwen2"], other)]
    recipe.write_text(json.dumps({"merge_method": "linear", "models": parents, "parameters": {"weight": 1}}))
    assert call(["merge", str(recipe), "-o", str(tmp_path / "out"), "--tokens", "0"]) == 0
    assert f"prediction head is that of {models['qwen2']}, unmerged" in capsys.readouterr().err
    assert same_head(open_checkpoint(models["qwen2"]), open_checkpoint(tmp_path / "out"))


def test_gguf_leaves_deepseeks_out_and_says_so(models, tmp_path, capsys):
    file, options = tmp_path / "out.gguf", ["--format", "gguf", "--type", "F16"]
    assert call(["export", str(models["deepseek_v3"]), "-o", str(file), *options]) == 0
    assert "prediction head is left out: attar writes none to gguf" in capsys.readouterr().err
    assert open_checkpoint(file).config["num_hidden_layers"] == 3


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_a_gguf_file_has_the_head_and_gives_it_back(family, models, tmp_path):
    source = open_checkpoint(models[family])
    file = export(models[family], tmp_path / "x.gguf", format="gguf", type="F32")
    again = Decoded(admit(file))
    assert again.config["num_hidden_layers"] == 3 and not file.notes
    assert again.mtp.keys() == source.mtp.keys()
    for name in source.mtp:
        torch.testing.assert_close(again.load(name), source.load(name), rtol=1e-6, atol=1e-7)
    dense = export(file, tmp_path / "dense", format="dense")
    assert dense.mtp.keys() == source.mtp.keys()
    coded = export(dense, tmp_path / "y.gguf", format="gguf", type="Q8_0", effort="fast", imatrix="none")
    assert {info.block for name, info in coded.mtp.items() if ".attn_q.weight" in name} == {"Q8_0"}


def test_a_gguf_file_with_a_head_is_the_source_of_pruning(models, tmp_path):
    file = export(models["glm4_moe"], tmp_path / "x.gguf", format="gguf", type="F32")
    cut = prune(file, tmp_path / "out", method="experts", experts=4, **TEXT)
    assert cut.config["n_routed_experts"] == 4
    assert {name.split(".")[5] for name in cut.mtp if ".experts." in name} == set("0123")


def test_a_gguf_file_with_a_part_of_a_block_is_refused(models, tmp_path, monkeypatch):
    placements = gguf.placements
    missing = "blk.3.attn_q.weight"
    monkeypatch.setattr(
        gguf, "placements", lambda *given: [item for item in placements(*given) if item.gguf != missing]
    )
    file = tmp_path / "x.gguf"
    with pytest.raises(CheckpointError, match=rf"there is no tensor '{missing}'"):
        admit(export(models["glm4_moe"], file, format="gguf", type="F32"))
        Decoded(open_checkpoint(file))


def test_a_gguf_file_with_nextn_blocks_of_deepseek_is_read_without_them(tmp_path, monkeypatch):
    folder = tiny_models.save(tiny_models.build("deepseek_v3", num_hidden_layers=4), tmp_path / "model")
    nextn = {"deepseek2.nextn_predict_layers": 1}
    monkeypatch.setattr(gguf, "described", lambda *given: {**described(*given), **nextn})
    opened = admit(export(folder, tmp_path / "x.gguf", format="gguf", type="F16"))
    assert opened.config["num_hidden_layers"] == 3
    assert len(opened.notes) == 1 and opened.notes[0].startswith("blk.3.")
    assert not any(name.startswith("model.layers.3.") for name in Decoded(opened).tensors)


def test_a_model_with_its_head_computes_what_it_does_without(models, tmp_path):
    bare = tiny_models.build("deepseek_v3")
    rows = tiny_models.tokens(bare, batch=1, length=12)
    with torch.no_grad():
        assert torch.equal(load_model(models["deepseek_v3"])(rows).logits, bare(rows).logits)


def mtp_error(folder: Path, written: Checkpoint) -> float:
    """The squared error of what a quantized head makes, of the squares of what the dense one does, on the
    model's states of rows that nothing was rounded with."""
    model, heads = load_model(folder, dtype=torch.float32), [load_mtp_head(open_checkpoint(folder))]
    heads.append(load_mtp_head(written))
    rows = text_rows(folder, "train", 8, data=DATA, length=64)
    with torch.no_grad(), recording_states(model, [len(discover(model).blocks)]) as states:
        model(input_ids=rows)
        embedded, positions = model.get_input_embeddings()(rows[:, 1:]), torch.arange(63)
        lost = total = 0.0
        for e, h in zip(embedded, states[0][:, :-1], strict=True):
            dense, rounded = (head(e, h, positions, None) for head in heads)
            lost += float((dense - rounded).square().sum())
            total += float(dense.square().sum())
    return lost / total


CALIBRATED: dict[str, Any] = {"data": DATA, "samples": 16, "sequence_length": 64, "check_tokens": 0}


@pytest.mark.parametrize(("family", "method"), [
    ("qwen2", "gptq"),
    ("qwen2", "yaqa"),
    pytest.param("qwen3_next", "gptq", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "gptq", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_method_rounds_it_with_the_states_that_feed_it(family, method, models, tmp_path):
    options = {"scheme": "W4A16", "group_size": 32, "check_tokens": 0}
    nearest = quantize(models[family], tmp_path / "rtn", method="rtn", **options)
    solved = quantize(models[family], tmp_path / "out", method=method, **{**options, **CALIBRATED})
    assert mtp_error(models[family], solved) < 0.9 * mtp_error(models[family], nearest)
    rows = solved.card.details["mtp"]
    coded = {name.removesuffix(".weight") for name in solved.mtp if name.endswith("packed")}
    assert "mtp" not in nearest.card.details and len(rows) == len(coded) >= 7
    assert all(row["tokens"] > 0 for row in rows if "experts" not in row["name"])
    assert sum(row["error"] for row in rows) < 0.8 * sum(row["rtn_error"] for row in rows)


def test_what_feeds_it_is_the_rounded_models_state_and_the_next_token(models, tmp_path, monkeypatch):
    seen, forward = [], MtpHead.forward

    def recorded(self: Any, e: torch.Tensor, h: torch.Tensor, *more: Any) -> torch.Tensor:
        seen.append((e, h))
        return forward(self, e, h, *more)

    monkeypatch.setattr(MtpHead, "forward", recorded)
    options = {**CALIBRATED, "samples": 2, "scheme": "W4A16", "group_size": 32, "precision": "fp32"}
    out = quantize(models["qwen2"], tmp_path / "out", method="gptq", **options)
    model = load_model(out, dtype=torch.float32)
    rows = text_rows(models["qwen2"], COMPRESSION, 2, data=DATA, length=64)
    with torch.no_grad(), recording_states(model, [len(discover(model).blocks)]) as states:
        model(input_ids=rows)
    for row, state, (e, h) in zip(rows, states[0], seen[-2:], strict=True):
        assert torch.equal(e, model.get_input_embeddings()(row[1:]))
        torch.testing.assert_close(h, state[:-1], rtol=0, atol=1e-3 * float(state.abs().max()))


def test_a_head_of_an_unknown_form_is_rounded_to_nearest(models, tmp_path, monkeypatch, capsys):
    def refuse(*_: Any, **__: Any) -> None:
        raise ModelError("its head is of a form unknown here")

    monkeypatch.setattr(mtp_rounding, "load_mtp_head", refuse)
    options = {**CALIBRATED, "samples": 2, "scheme": "W4A16", "group_size": 32}
    out = quantize(models["qwen2"], tmp_path / "out", method="gptq", **options)
    assert "mtp" not in out.card.details
    name = f"{tiny_mtp.block_name('qwen2', 3)}.mlp.up_proj.weight"
    wanted = rtn(open_checkpoint(models["qwen2"]).load(name), IntGrid(4, 32, storage=torch.float32))
    assert torch.equal(Decoded(out.with_mtp).load(name), wanted.dequantize())


@pytest.mark.slow
def test_drafts_of_a_trained_head_are_accepted_as_often(tmp_path):
    """attar:tiny with a head that starts as its last layer and learns what the model says next."""
    folder = trained_head(tmp_path / "model")
    model, rows = load_model(folder, dtype=torch.float32), text_rows(folder, COMPRESSION, 32, seed=7)
    options = {"scheme": "W3A16", "group_size": 32, "check_tokens": 0, "tune": 0}
    calibration = {"data": "python-docs", "samples": 64, "sequence_length": 128}
    outputs = {"rtn": quantize(folder, tmp_path / "rtn", method="rtn", **options)}
    outputs["gptq"] = quantize(folder, tmp_path / "gptq", method="gptq", **options, **calibration)
    accepted = {name: acceptance(model, load_mtp_head(out), rows) for name, out in outputs.items()}
    dense = acceptance(model, load_mtp_head(open_checkpoint(folder)), rows)
    assert dense > 0.25
    assert accepted["gptq"] >= accepted["rtn"] and accepted["gptq"] > dense - 0.01


def text_rows(
    folder: Path, split: str, count: int, *, seed: int = 0, data: str = "python-docs", length: int = 128
) -> torch.Tensor:
    tokenizer = load_tokenizer(open_checkpoint(folder))
    sizes: dict[str, Any] = {"samples": count, "sequence_length": length, "batch_size": 4, "seed": seed}
    return torch.cat(calibration_batches(tokenizer, data, bos="auto", split=split, **sizes))


def drafted(model: Any, head: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the head (B, S - 1, V), and the tokens that the model would take there."""
    with torch.no_grad(), recording_states(model, [len(discover(model).blocks)]) as states:
        wanted = model(input_ids=rows).logits[:, 1:].argmax(-1)
        inputs = head.norms[1](states[0][:, :-1]), head.norms[0](model.get_input_embeddings()(rows[:, 1:]))
    x = head.joint(torch.cat(inputs, -1))  # MiMo: the state first
    block = head.block(inputs_embeds=x, use_cache=False).last_hidden_state
    return model.lm_head(head.norm(block)), wanted


def acceptance(model: Any, head: Any, rows: torch.Tensor) -> float:
    """The share of tokens of which the head's first draft is the model's."""
    with torch.no_grad():
        logits, wanted = drafted(model, head, rows)
    return float((logits.argmax(-1) == wanted).float().mean())


def trained_head(folder: Path) -> Path:
    """attar:tiny with a head of MiMo's form, trained for 150 steps."""
    source, prefix = open_checkpoint("attar:tiny"), "model.mtp_layers.0."
    folder.mkdir()
    for file in source.path.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: source.load(name).float() for name in source.tensors}
    width = config["hidden_size"]
    own = {f"{name}.weight": torch.ones(width) for name in ("token_layernorm", "hidden_layernorm")}
    own |= {"input_proj.weight": torch.cat([torch.eye(width), 0.5 * torch.eye(width)], 1)}
    own |= {"final_layernorm.weight": tensors["model.norm.weight"].clone()}
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    own |= {name.removeprefix(last): t.clone() for name, t in tensors.items() if name.startswith(last)}
    tensors |= {f"{prefix}{name}": tensor for name, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model, head = load_model(folder, dtype=torch.float32), load_mtp_head(open_checkpoint(folder))
    model.requires_grad_(False)
    head.requires_grad_(True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3)
    for rows in text_rows(folder, "train", 600).split(4):
        logits, wanted = drafted(model, head, rows)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    block = head.block.layers[0].state_dict()
    learned = {"input_proj.weight": head.joint.weight, "final_layernorm.weight": head.norm.weight}
    learned |= {
        "token_layernorm.weight": head.norms[0].weight,
        "hidden_layernorm.weight": head.norms[1].weight,
    }
    tensors |= {f"{prefix}{name}": t.detach().clone() for name, t in {**block, **learned}.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
