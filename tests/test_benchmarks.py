"""The benchmarks' own arithmetic: jobs, schemes, tables, the cache, rounding of inputs. No peer is needed."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

import export as gguf_files  # noqa: E402
import quality  # noqa: E402
import quantize as timing  # noqa: E402
import real  # noqa: E402
import real_quality  # noqa: E402
import real_table  # noqa: E402
from peers import activations, environments, job, launch  # noqa: E402

JOB = job.Job(model="m", tokens="t", out="o", method="gptq", bits=3, symmetric=False)


def test_a_job_survives_its_json():
    assert job.parse(JOB.text()) == JOB


@pytest.mark.parametrize("text", ['{"modle": "m"}', '{"model": "m"}'])
def test_a_job_with_a_wrong_or_missing_key_is_refused(text):
    with pytest.raises(SystemExit, match="job"):
        job.parse(text)


def test_methods_change_the_job_and_keep_the_rest_as_options():
    method = launch.parse_method("attar", "gptq,act_order=none,damp=0.05,scales=absmax")
    made = launch.with_method(JOB, method)
    assert (made.method, made.act_order, made.bits) == ("gptq", "none", 3)
    assert made.options == {"damp": 0.05, "scales": "absmax"}
    assert method.label == "gptq,act_order=none,damp=0.05,scales=absmax"


def test_schemes_by_their_short_names():
    assert quality.parse_scheme("W3:64:asym") == {
        "scheme": "INT",
        "bits": 3,
        "group_size": 64,
        "symmetric": False,
    }
    assert quality.parse_scheme("NF4")["group_size"] == 64
    assert quality.parse_scheme("FP8_DYNAMIC")["scheme"] == "FP8_DYNAMIC"
    for text in ("W9:128", "W4", "NF4:x", "int4"):
        with pytest.raises(SystemExit, match="no scheme"):
            quality.parse_scheme(text)


def arguments(**changes):
    usual = quality.arguments().parse_args([])
    return Namespace(**{**vars(usual), **changes})


def test_cells_run_dataless_methods_once_and_differ_by_key():
    args = arguments(schemes=["W4:128", "FP8"], methods=["rtn", "gptq"], peers=["llmcompressor"], seeds=3)
    cells = list(quality.cells(args, "digest"))
    assert len({cell.text for cell in cells}) == len(cells)
    count = {}
    for cell in cells:
        name = (cell.key["scheme"], cell.method.tool, cell.method.label)
        count[name] = count.get(name, 0) + 1
    assert count["W4:128", "attar", "rtn"] == count["W4:128", "llmcompressor", "rtn"] == 1
    assert count["FP8", "attar", "rtn"] == count["W4:128", "llmcompressor", "gptq"] == 3
    assert not any(scheme == "FP8" and label == "awq" for scheme, _, label in count)


def test_the_cache_forgets_a_line_that_was_cut_short(tmp_path):
    file = tmp_path / "cache.jsonl"
    file.write_text(json.dumps({"key": {"b": 1, "a": 2}, "found": {"kl": 0.5}}) + '\n{"key": {"a"')
    assert quality.read_cache(file) == {'{"a": 2, "b": 1}': {"kl": 0.5}}
    assert quality.read_cache(tmp_path / "none") == {}
    assert gguf_files.read_cache(tmp_path / "none") == gguf_files.read_cache(None) == {}
    file.write_text('{"key": "a", "found": 1}\n{"key": "b", "fou')
    assert gguf_files.read_cache(file) == {"a": 1}


def test_the_next_row_after_a_cut_line_is_kept(tmp_path):
    file = tmp_path / "cache.jsonl"
    for text in ("", '{"key": "a", "found": 1}\n', '{"key": "a", "found": 1}\n{"key": "b", "fou'):
        file.write_text(text)
        quality.append_row(file, {"key": "c", "found": 2})
        quality.append_row(file, {"key": "d", "found": 3})
        assert [row["key"] for row in quality.read_rows(file)][-2:] == ["c", "d"]
    assert gguf_files.read_cache(file) == {"a": 1, "c": 2, "d": 3}


def cell(kl):
    return {"kl": kl, "kl_p99": 2 * kl, "top1": 0.9, "perplexity": 7.0, "seconds": 1.0}


def test_quality_table_gives_mean_spread_and_the_ratio_to_the_best_peer():
    rows = {
        ("gptqmodel", "gptq"): [cell(0.4)],
        ("llmcompressor", "gptq"): [cell(0.1), cell(0.3)],
        ("attar", "gptq"): [cell(0.1)],
    }
    first, second, third = quality.table("W4:128", rows).splitlines()[2:]
    assert first.startswith("| attar | gptq | 1.000e-01 |") and "| 0.50 |" in first
    assert second.startswith("| llmcompressor | gptq | 2.000e-01 ± 1.4e-01 |") and "| 1.00 |" in second
    assert third.startswith("| gptqmodel |") and "| 2.00 |" in third


def test_a_method_that_failed_has_a_row_with_its_reason():
    rows = {("auto-round", "autoround"): [{"failed": "longer than 9 s"}], ("attar", "gptq"): [cell(0.1)]}
    ours, theirs = quality.table("W4:128", rows).splitlines()[2:]
    assert ours.startswith("| attar | gptq | 1.000e-01 |") and "| – |" in ours
    assert theirs == "| auto-round | autoround | failed: longer than 9 s | | | | | |"


def test_timing_goes_forth_and_back_and_takes_smallest_time_and_largest_peak():
    ours, theirs = launch.Method("attar", "gptq"), launch.Method("gptqmodel", "gptq")
    assert [method for _, method in timing.plan([ours, theirs], 3)] == [
        ours,
        theirs,
        theirs,
        ours,
        ours,
        theirs,
    ]
    runs = {
        ours: [timing.Run(2.0, 5.0, 600.0, 400.0, 0.1), timing.Run(1.0, 6.0, 500.0, 400.0, 0.1)],
        theirs: [timing.Run(3.0, 9.0, 900.0, 500.0, 0.2)],
    }
    first, second = timing.table(runs).splitlines()[2:]
    assert first == "| gptq | attar | 1.00 | 5.0 | 600 | 400 | 1.000e-01 | 1.00 |"
    assert second == "| gptq | gptqmodel | 3.00 | 9.0 | 900 | 500 | 2.000e-01 | 3.00 |"


def test_inputs_rounded_to_int8_per_token_by_hand():
    x = torch.tensor([[0.0, -255.0, 100.4], [2.55, 0.013, -1.0]])
    how = {"type": "int", "bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
    # scales 2 and 0.02: codes 0, -127.5 -> -128 (to even), 50.2 and 127.5 -> 128 -> 127, 0.65, -50
    expected = torch.tensor([[0.0, -256.0, 100.0], [2.54, 0.02, -1.0]])
    torch.testing.assert_close(activations.rounded(x, how), expected)


def test_static_inputs_keep_their_scale_and_saturate():
    x = torch.tensor([1000.0, 3.3, -0.26])
    how = {"type": "float", "bits": 8, "symmetric": True, "strategy": "tensor", "dynamic": False}
    found = activations.rounded(x, {**how, "scale": 0.5, "zero": 0.0})
    # 3.3 / 0.5 = 6.6 lies between e4m3's 6.5 and 7.0; -0.52 between -0.5 and -0.5625
    torch.testing.assert_close(found, torch.tensor([224.0, 3.25, -0.25]))
    shifted = {"type": "int", "bits": 8, "symmetric": False, "strategy": "tensor", "dynamic": False}
    torch.testing.assert_close(
        activations.rounded(x, {**shifted, "scale": 0.5, "zero": 10.0}), torch.tensor([58.5, 3.5, -0.5])
    )


def test_named_linears_round_their_inputs_and_others_do_not():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    x = torch.randn(3, 4)
    how = {"type": "int", "bits": 2, "symmetric": True, "strategy": "tensor", "dynamic": True}
    expected = model[1](activations.rounded(model[0](x), how))
    activations.round_inputs(model, {"1": how})
    torch.testing.assert_close(model(x), expected)


def test_a_dense_checkpoint_keeps_what_the_tool_did_not_change(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    save_file({"a.weight": torch.zeros(2, 2), "b.weight": torch.ones(2)}, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama", "quantization_config": {}}')
    (source / "tokenizer.json").write_text("{}")
    made = job.Job(model=str(source), tokens="", out=str(out), method="rtn")
    job.write_dense(made, {"a.weight": torch.full((2, 2), 3.0), "spare": torch.ones(1)}, {"a": {"bits": 8}})
    tensors = load_file(out / "model.safetensors")
    assert sorted(tensors) == ["a.weight", "b.weight"]
    assert tensors["a.weight"].unique().item() == 3.0 and tensors["b.weight"].unique().item() == 1.0
    assert json.loads((out / "config.json").read_text()) == {"model_type": "llama"}
    assert (out / "tokenizer.json").is_file()
    assert json.loads((out / job.ACTIVATIONS).read_text()) == {"a": {"bits": 8}}
    with pytest.raises(SystemExit, match="came back"):
        job.write_dense(made, {"a.weight": torch.zeros(2, 3)})


def test_output_error_of_scaled_blocks(tmp_path):
    from attar.models.load import load_model, save_model

    model = load_model("attar:tiny", dtype=torch.float32)
    rows = torch.arange(64).reshape(2, 32)
    save_model(model, tmp_path / "same")
    assert timing.output_error(model, tmp_path / "same", rows) == 0.0
    with torch.no_grad():  # blocks that add nothing: the error is the whole of what they added
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
    save_model(model, tmp_path / "idle")
    again = load_model("attar:tiny", dtype=torch.float32)
    assert timing.output_error(again, tmp_path / "idle", rows) == pytest.approx(1.0, rel=1e-6)


def test_a_peer_without_an_environment_has_no_version(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTAR_PEERS", str(tmp_path))
    assert environments.folder() == tmp_path
    assert environments.version("gptqmodel") is None
    with pytest.raises(SystemExit, match="no peer"):
        environments.python("gptq-model")


def test_a_runner_that_dies_is_an_error_with_its_last_words(tmp_path):
    with pytest.raises(launch.RunnerError, match="attar: "):
        launch.launch("attar", job.Job(model=str(tmp_path), tokens="none", out="o", method="rtn"))


def test_measuring_on_another_text_is_another_cell():
    fixed = {"schemes": ["W4:64"], "methods": ["rtn"], "peers": []}
    plain, other = (next(quality.cells(arguments(**fixed, test=text), "d")) for text in ("", "test.txt"))
    assert "test" not in plain.key  # caches that are there stay of use
    assert other.key == {**plain.key, "test": "test.txt"}


@pytest.mark.parametrize("name", real.PARTS)
def test_every_part_of_the_real_model_is_a_function(name):
    assert callable(real.part(name))


def test_the_real_model_s_options_pass_others_over_and_give_every_tool_the_same(tmp_path):
    rest = [
        "--work",
        str(tmp_path),
        "--data",
        "d",
        "--rounds",
        "3",
        "--tokens",
        "64",
        "--peers",
        "auto-round",
    ]
    args = real_quality.options([*rest, "--peers", "auto-round"])
    (tmp_path / "smollm2-dense").mkdir()
    packed, files = real_quality.quality_options(args), real_quality.gguf_options(args)
    for one in (packed, files):
        assert (one.data, one.test) == ("d/wikitext-2/valid.txt", "d/wikitext-2/test.txt")
        assert (one.samples, one.length, one.tokens) == (128, 256, 64)
    assert packed.peers == ["auto-round"]
    assert files.mixes == []


def test_the_readme_s_table_joins_our_results_with_the_best_peer_s(tmp_path, monkeypatch):
    rest = ["--work", str(tmp_path), "--data", "d", "--samples", "2", "--results", "original", "W4", "Q2_K"]
    _, wanted = real_table.asked(rest)
    assert wanted == ["original", "W4", "Q2_K"]
    dense = tmp_path / "smollm2-dense"
    dense.mkdir()
    monkeypatch.setattr(real_table, "open_checkpoint", lambda _: Namespace(nbytes=200e6))
    key = {"scheme": "W4:64", "tool": "auto-round", "method": "autoround", "samples": 2, "length": 256}
    key["tokens"] = 8192
    theirs = [(key, 0.5), ({**key, "tool": "gptqmodel"}, 0.7), ({**key, "tool": "attar"}, 0.1)]
    theirs += [({**key, "samples": 9}, 0.2), ({**key, "tokens": 64}, 0.3)]
    lines = [json.dumps({"key": key, "found": {"kl": kl}}) for key, kl in theirs]
    lines.append(json.dumps({"key": {**key, "tool": "llmcompressor"}, "found": {"failed": "why"}}))
    (tmp_path / "quality.jsonl").write_text("\n".join(lines))
    files = [
        (["digest", "Q2_K", "llama-cpp", "imatrix", 2, 256, tokens, "d"], tokens) for tokens in (8192, 64)
    ]
    lines = [json.dumps({"key": json.dumps(key), "found": {"kl": tokens / 2**15}}) for key, tokens in files]
    (tmp_path / "gguf.jsonl").write_text("\n".join(lines))
    found = {"kl": 0.4, "perplexity": 20.0, "kept": 0.95, "bytes": 50e6, "decode": 321.4}
    found["tasks"] = {name: [0.5, 0.01] for name in real_table.SETS}
    monkeypatch.setattr(real_table, "rows", lambda *_, **__: dict.fromkeys(wanted, found))
    table = real_table.table(rest).splitlines()
    assert table[0] == "<!-- table:real -->"
    assert table[3] == "| original | 50.0 | 4.0x | 20.00 | 95.0 % | 0.400 | – | 50.0 |"
    assert "| 0.400 | 0.500 (auto-round autoround) |" in table[4]
    assert "| 0.400 | 0.250 (llama.cpp imatrix) |" in table[5]
