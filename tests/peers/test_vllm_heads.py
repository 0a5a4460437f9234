"""Exported draft heads in vLLM's own code: its config conversion, model classes and load_weights
(load_vllm_head.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from attar.formats.draft_heads.table import HEAD_LAYOUTS
from tests.formats.draft_heads.stored_heads import TARGET, L, V, block, eagle, eagle3, table

FILES = Path(os.environ.get("ATTAR_PEERS", "")) / "vllm-wheel" / "0.33.0"
if "ATTAR_PEERS" not in os.environ or not FILES.exists():
    pytest.skip("no vllm-wheel: set ATTAR_PEERS", allow_module_level=True)
pytestmark = pytest.mark.peers

CASES = {
    "dspark": ("speculators", block("dspark", rank=4, confidence=True)),
    "dspark-reduced": ("speculators", block("dspark", rank=4, draft_vocabulary=9)),
    "dspark-bonus": ("speculators", block("dflash", rank=4, confidence=True)),
    "dspark-deepspec": ("deepspec", block("dspark", rank=4, confidence=True, draft_vocabulary=9)),
    "dflash": ("speculators", block("dflash", draft_vocabulary=11, mask=table()[17].clone())),
    "dflash-anchor": ("speculators", block("dspark", depth=1, bias=True)),
    "dflash-deepspec": ("deepspec", block("dflash")),
    "eagle3": ("speculators", eagle3()),
    "eagle3-five": ("speculators", eagle3(layers=(0, 1, 2, 3, 5), draft_vocabulary=0)),
    "eagle3-norms": ("speculators", eagle3(norms=True, fc_norm=True, norm_output=True)),
    "eagle3-before": ("speculators", eagle3(norm_before_fc=True, norm_before_residual=True, bias=True)),
    "eagle3-eagle": ("eagle", eagle3(layers=(0, 2), norm_before_fc=True)),
    "eagle": ("eagle", eagle(bias=False)),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What vLLM makes of each case."""
    folder = tmp_path_factory.mktemp("heads")
    for name, (layout, head) in CASES.items():
        write(folder / name, *HEAD_LAYOUTS[layout].encode(head))
    return run([folder / name for name in CASES])


def write(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")


def run(folders):
    script = Path(__file__).with_name("load_vllm_head.py")
    target = json.dumps({"layers": L, "vocabulary": V})
    command = [sys.executable, str(script), str(FILES), target, *map(str, folders)]
    process = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert process.returncode == 0, process.stderr[-2000:]
    reports = json.loads(process.stdout.splitlines()[-1])
    return {folder.name: report for folder, report in zip(folders, reports, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_vllm_has_a_place_for_each_tensor_and_misses_none(reports, name):
    assert (reports[name]["unknown"], reports[name]["missing"], reports[name]["ignored"]) == ([], [], [])


@pytest.mark.parametrize("name", CASES)
def test_vllm_takes_the_targets_head_where_ours_does(reports, name):
    head = CASES[name][1]
    assert ("lm_head.weight" in reports[name]["own"]) is ("lm_head.weight" in head.tensors)
    assert reports[name]["config"]["draft_vocab_size"] == (head.values["draft_vocabulary"] or V)


@pytest.mark.parametrize("name", CASES)
def test_vllm_reads_the_states_that_the_head_was_trained_on(reports, name):
    head = CASES[name][1]
    entering = [layer + 1 for layer in head.values["layers"]]
    assert reports[name]["aux"] == (None if head.kind == "eagle" else entering)


@pytest.mark.parametrize("name", [name for name, (layout, _) in CASES.items() if layout == "speculators"])
def test_vllm_takes_the_method_and_the_drafts_from_the_folder(reports, name):
    method = name.partition("-")[0]
    assert (reports[name]["method"], reports[name]["num_speculative_tokens"]) == (method, 3)


@pytest.mark.parametrize("name", [name for name, (_, head) in CASES.items() if head.kind.startswith("d")])
def test_vllm_drafts_from_the_slot_that_was_trained(reports, name):
    config, (_, head) = reports[name]["config"], CASES[name]
    inner = config["dflash_config"] or {}
    anchor = head.kind == "dspark"
    assert inner.get("sample_from_anchor", config["sample_from_anchor"]) is anchor
    if name.startswith("dspark-") or name == "dspark":
        assert config["sample_from_anchor"] is anchor and config["markov_rank"] == 4
        assert config["dspark_bonus_anchor"] in (not anchor, None)
    assert not inner.get("causal")  # a block sees itself whole


def test_vllm_reads_the_switches_of_eagle3(reports):
    for name in ("eagle3", "eagle3-norms", "eagle3-before"):
        values, config = CASES[name][1].values, reports[name]["config"]
        assert config["norm_before_residual"] is values["norm_before_residual"]
        assert config["norm_output"] is values["norm_output"]
        assert config["rope_parameters"]["rope_theta"] == 50000.0


@pytest.mark.parametrize("markov", ["gated", "rnn"])
def test_vllm_has_the_plain_markov_head_alone(tmp_path, markov):
    write(tmp_path / markov, *HEAD_LAYOUTS["speculators"].encode(block("dspark", rank=4, markov=markov)))
    unknown = run([tmp_path / markov])[markov]["unknown"]
    assert len(unknown) == 2 and all("markov_head." in name for name in unknown)


def test_a_tensor_that_is_missing_or_of_another_shape_is_seen(tmp_path):
    config, tensors = HEAD_LAYOUTS["speculators"].encode(block("dspark", rank=4))
    write(tmp_path / "less", config, {k: x for k, x in tensors.items() if k != "hidden_norm.weight"})
    write(tmp_path / "other", config, {**tensors, "fc.weight": torch.zeros(3, 3)})
    reports = run([tmp_path / "less", tmp_path / "other"])
    assert reports["less"]["missing"] == ["model.hidden_norm.weight"]
    assert reports["other"]["unknown"] == ["model.fc.weight (3, 3): of (12, 36)"]
    assert TARGET.layers == L
