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

import encoder  # noqa: E402
import export as gguf_files  # noqa: E402
import gpu  # noqa: E402
import quality  # noqa: E402
import quantize as timing  # noqa: E402
import real  # noqa: E402
import real_kv  # noqa: E402
import real_quality  # noqa: E402
import real_table  # noqa: E402
import serve_pair  # noqa: E402
from peers import activations, environments, job, launch  # noqa: E402

from attar.cli.main import VERBS  # noqa: E402
from attar.distillation.settings import distill_settings, recover_settings  # noqa: E402
from attar.recipe.stages import load as load_command  # noqa: E402

JOB = job.Job(model="m", tokens="t", out="o", method="gptq", bits=3, symmetric=False)


def test_the_losses_of_an_encoder_s_students_are_settings():
    for phases in encoder.STUDENTS.values():
        first, *later = phases
        distill_settings(**first)
        assert all(recover_settings(**losses).runs_teacher for losses in later)
    assert encoder.Cell("labels alone", "depth", 1).name == "depth-labels-alone-1"


def test_a_job_survives_its_json():
    assert job.parse(JOB.text()) == JOB


@pytest.mark.parametrize("text", ['{"modle": "m"}', '{"model": "m"}'])
def test_a_job_with_a_wrong_or_missing_key_is_refused(text):
    with pytest.raises(SystemExit, match="job"):
        job.parse(text)


def test_methods_change_the_job_and_keep_the_rest_as_options():
    method = launch.parse_method("attar", "gptq,act_order=none,damp=0.05,scales=absmax")
    result = launch.with_method(JOB, method)
    assert (result.method, result.act_order, result.bits) == ("gptq", "none", 3)
    assert result.options == {"damp": 0.05, "scales": "absmax"}
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
    assert quality.parse_scheme("NVFP4A16") == {"scheme": "NVFP4A16", "bits": 4, "group_size": 16}
    for text in ("W9:128", "W4", "NF4:x", "int4"):
        with pytest.raises(SystemExit, match="no scheme"):
            quality.parse_scheme(text)


def arguments(**changes):
    usual = quality.arguments().parse_args([])
    return Namespace(**{**vars(usual), **changes})


def test_cells_run_dataless_methods_once_and_differ_by_key():
    args = arguments(
        schemes=["W4:128", "FP8"], methods=["rtn", "gptq"], peers=["llmcompressor"], seeds=[0, 1, 2]
    )
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
    return {"kl": kl, "kl_p99": 2 * kl, "top1": 0.9, "perplexity": 7.0, "cpu": 1.0}


def test_quality_table_gives_mean_spread_and_the_ratio_to_the_best_peer():
    rows = {
        ("gptqmodel", "gptq"): [cell(0.4)],
        ("llmcompressor", "gptq"): [cell(0.1), cell(0.3)],
        ("attar", "gptq"): [cell(0.1)],
    }
    first, second, third = quality.table("W4:128", rows).splitlines()[2:]
    assert first.startswith("| attar | gptq | 1.000e-01 |") and "| 0.50 |" in first
    assert (
        second.startswith("| llmcompressor | gptq | 2.000e-01 (1.000e-01–3.000e-01) |")
        and "| 1.00 |" in second
    )
    assert third.startswith("| gptqmodel |") and "| 2.00 |" in third


def test_a_further_text_has_its_column_and_each_kl_its_error():
    found = cell(0.1) | {"kl_error": 0.01, "others": {"d/code.txt": {"kl": 0.3, "kl_error": 0.02}}}
    head, _, row = quality.table("W4:128", {("attar", "gptq"): [found, found]}).splitlines()
    assert head.endswith("| KL, code.txt |") and row.endswith("| 3.000e-01 ± 2.0e-02 |")
    assert row.startswith("| attar | gptq | 1.000e-01 ± 1.0e-02 |")


def test_tables_of_what_is_cached_run_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "make_reference", lambda *_, **__: pytest.fail("it measures"))
    args = arguments(schemes=["W4:128"], methods=["rtn", "gptq"], cached=True)
    (known, _) = quality.cells(args, quality.digest_of(quality.open_checkpoint("attar:tiny")))
    text = quality.run_model("attar:tiny", args, {known.text: cell(0.25)}, tmp_path)
    assert [row for row in text.splitlines() if row.startswith("| attar")] == [
        "| attar | rtn | 2.500e-01 | 5.00e-01 | 0.9000 | 7.000 | – | 1 |"
    ]


def test_a_method_that_failed_has_a_row_with_its_reason():
    rows = {("auto-round", "autoround"): [{"failed": "longer than 9 s"}], ("attar", "gptq"): [cell(0.1)]}
    ours, theirs = quality.table("W4:128", rows).splitlines()[2:]
    assert ours.startswith("| attar | gptq | 1.000e-01 |") and "| – |" in ours
    assert theirs == "| auto-round | autoround | failed: longer than 9 s | | | | | |"


def test_what_a_mix_is_on_a_model():
    lines = real_quality.types(quality.open_checkpoint("attar:tiny").path, ["Q4_K_M"]).splitlines()
    name, average, shares = lines[2].strip("| ").split(" | ")
    assert name == "Q4_K_M" and 4.5 <= float(average) < 6 and "Q4_K" in shares


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
    actual = activations.rounded(x, {**how, "scale": 0.5, "zero": 0.0})
    # 3.3 / 0.5 = 6.6 lies between e4m3's 6.5 and 7.0; -0.52 between -0.5 and -0.5625
    torch.testing.assert_close(actual, torch.tensor([224.0, 3.25, -0.25]))
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
    result = job.Job(model=str(source), tokens="", out=str(out), method="rtn")
    job.write_dense(result, {"a.weight": torch.full((2, 2), 3.0), "spare": torch.ones(1)}, {"a": {"bits": 8}})
    tensors = load_file(out / "model.safetensors")
    assert sorted(tensors) == ["a.weight", "b.weight"]
    assert tensors["a.weight"].unique().item() == 3.0 and tensors["b.weight"].unique().item() == 1.0
    assert json.loads((out / "config.json").read_text()) == {"model_type": "llama"}
    assert (out / "tokenizer.json").is_file()
    assert json.loads((out / job.ACTIVATIONS).read_text()) == {"a": {"bits": 8}}
    with pytest.raises(SystemExit, match="came back"):
        job.write_dense(result, {"a.weight": torch.zeros(2, 3)})


@pytest.mark.slow
def test_output_error_of_scaled_blocks(tmp_path):
    from attar.models.loading.load import load_model, save_model

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


@pytest.mark.slow
def test_a_runner_that_dies_is_an_error_with_its_last_words(tmp_path):
    with pytest.raises(launch.RunnerError, match="attar: "):
        launch.launch("attar", job.Job(model=str(tmp_path), tokens="none", out="o", method="rtn"))


def test_measuring_on_another_text_is_another_cell():
    fixed = {"schemes": ["W4:64"], "methods": ["rtn"], "peers": []}
    texts = ([], ["test.txt"], ["test.txt", "code.txt"])
    plain, other, both = (next(quality.cells(arguments(**fixed, test=each), "d")) for each in texts)
    assert "test" not in plain.key  # caches that are there stay of use
    assert other.key == {**plain.key, "test": "test.txt"}
    assert both.key == {**other.key, "others": ["code.txt"]}


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
        assert one.data == "d/wikitext-2/valid.txt"
        assert (one.samples, one.length, one.tokens) == (128, 256, 64)
    assert (packed.test, files.test) == (["d/wikitext-2/test.txt", "python-stdlib"], "d/wikitext-2/test.txt")
    assert packed.peers == ["auto-round"] and not packed.cached
    assert real_quality.quality_options(real_quality.options([*rest, "--cached"])).cached
    assert files.mixes == []


def test_the_readme_s_table_joins_our_results_with_the_best_peer_s(tmp_path, monkeypatch):
    rest = [
        "--work",
        str(tmp_path),
        "--data",
        "d",
        "--seeds",
        "0",
        "1",
        "--samples",
        "2",
        "--results",
        "decoded to bf16",
        "W4",
        "Q2_K",
    ]
    _, wanted = real_table.asked(rest)
    assert wanted == ["decoded to bf16", "W4", "Q2_K"]
    dense = tmp_path / "smollm2-dense"
    dense.mkdir()
    monkeypatch.setattr(real_table, "open_checkpoint", lambda _: Namespace(nbytes=200e6))
    key = {"scheme": "W4:64", "tool": "auto-round", "method": "autoround", "samples": 2, "length": 256}
    key |= {"tokens": 8192, "seed": 0, "iterations": 200}
    theirs = [(key, 0.5), ({**key, "seed": 1}, 0.6), ({**key, "tool": "gptqmodel"}, 0.7)]
    theirs += [({**key, "tool": "attar"}, 0.1), ({**key, "seed": 7}, 0.1), ({**key, "iterations": 50}, 0.1)]
    theirs += [({**key, "samples": 9}, 0.2), ({**key, "tokens": 64}, 0.3)]
    lines = [json.dumps({"key": key, "found": {"kl": kl}}) for key, kl in theirs]
    lines.append(json.dumps({"key": {**key, "tool": "llmcompressor"}, "found": {"failed": "why"}}))
    (tmp_path / "quality.jsonl").write_text("\n".join(lines))
    files = [
        (["digest", "Q2_K", "llama-cpp", "imatrix", seed, 2, 256, tokens, "d"], tokens)
        for seed, tokens in ((0, 8192), (0, 64), (7, 64))
    ]
    lines = [json.dumps({"key": json.dumps(key), "found": {"kl": tokens / 2**15}}) for key, tokens in files]
    (tmp_path / "gguf.jsonl").write_text("\n".join(lines))
    actual = {"kl": 0.4, "perplexity": 20.0, "kept": 0.95, "kept_error": 0.01, "bytes": 50e6, "decode": 321.4}
    actual["tasks"] = {name: [0.5, 0.01] for name in real_table.SETS}
    other = {
        **actual,
        "kl": 0.5,
        "perplexity": 22.0,
        "tasks": {name: [0.6, 0.01] for name in real_table.SETS},
    }
    rows = {wanted[0]: [actual], "W4": [actual, other], "Q2_K": [actual]}
    monkeypatch.setattr(real_table, "rows", lambda *_, **__: rows)
    table = real_table.table(rest).splitlines()
    assert table[0] == "<!-- table:real -->"
    assert table[3] == f"| {wanted[0]} | 50.0 | 4.0x | 20.00 | 95.0 ± 1.0 % | 0.400 | – | 50.0 ± 1.0 |"
    assert "| 21.00 (20.00–22.00) | 95.0 ± 1.0 % | 0.450 (0.400–0.500) |" in table[4]
    assert "| 0.550 (0.500–0.600) auto-round autoround | 55.0 ± 1.0 |" in table[4]
    assert "| 0.400 | 0.250 llama.cpp imatrix |" in table[5]


def test_the_file_and_its_decoding_are_measured_once_and_a_result_for_every_seed(tmp_path, monkeypatch):
    results = []
    monkeypatch.setattr(real_table, "make", lambda result, _, seed: results.append((result.name, seed)))
    monkeypatch.setattr(real_table, "dense", lambda _: tmp_path)
    monkeypatch.setattr(real_table, "make_reference", lambda *_, **__: "reference")
    monkeypatch.setattr(real_table, "served", lambda *_: {"bytes": 1})
    monkeypatch.setattr(real_table, "exact", lambda *_: {"kl": 0.1})
    names = [real_table.SOURCE.name, "decoded to bf16", "W4"]
    rest = ["--work", str(tmp_path), "--seeds", "3", "5", "--results", *names]
    for _ in range(2):  # the second time all of it is there
        rows = real_table.rows(*real_table.asked(rest), fill=True)
        assert {name: len(seeds) for name, seeds in rows.items()} == dict(zip(names, (1, 1, 2), strict=True))
        assert results == [(names[0], 3), (names[1], 3), ("W4", 3), ("W4", 5)]


def test_quality_kept_is_as_uncertain_as_the_tokens_on_which_two_models_disagree():
    numbers = {"accuracy": 0.45, "quality_kept": 0.9, "top1_agreement": 0.84, "tokens": 1600}
    assert real_table.kept_error(Namespace(**numbers)) == pytest.approx(0.01 / 0.5)


@pytest.mark.parametrize(("values", "text"), [([0.1], "0.10"), ([0.1, 0.2, 0.3], "0.20 (0.10–0.30)")])
def test_a_spread_is_a_mean_and_a_range(values, text):
    assert quality.spread(values, ".2f") == text


@pytest.fixture
def tiny_kv(tmp_path, monkeypatch):
    """The tables of the real model's cache, on the embedded one and on a text of numbers; their options."""
    monkeypatch.setattr(real_kv, "MODEL", "attar:tiny")
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "test.txt").write_text(" ".join(map(str, range(2000))))
    return ["--data", str(tmp_path), "--lengths", "320", "--tail", "16"]


@pytest.mark.slow
def test_keys_in_few_bits_cost_more_than_in_eight(tiny_kv):
    table = real_kv.kv([*tiny_kv, "--tables", "formats", "--formats", "int8", "kivi2"]).splitlines()[4:]
    cells = [[cell.strip() for cell in row.split("|")[3:-1]] for row in table]
    assert [row[:2] for row in cells] == [["float32", "32.0"], ["int8", "9.0"], ["kivi2", "3.0"]]
    first, eight, two = (float(row[5]) for row in cells)
    assert abs(first) < 1e-5 <= eight < two


@pytest.mark.slow
def test_what_keeps_everything_changes_nothing_and_a_fifth_does(tiny_kv):
    (text,) = real_kv.passages("wikitext", 320, 1, Path(tiny_kv[1]))
    actual = real_kv.tails(text[:-8], text[-8:], ["SnapKV", "Reread", "H2O"], [1.0, 0.5])
    full = actual["everything", 1.0]
    for name in ("SnapKV", "Reread", "H2O"):
        torch.testing.assert_close(actual[name, 1.0], full, atol=1e-4, rtol=1e-4)
        assert (actual[name, 0.5] - full).abs().max() > 1e-2
    with pytest.raises(SystemExit, match="tokens are not 1000 texts of 4,096"):
        real_kv.passages("wikitext", 4096, 1000, Path(tiny_kv[1]))


def test_a_needle_is_right_where_its_word_is_the_likeliest_of_ten(tiny_kv, monkeypatch):
    def logits(prompt, given, methods, shares):
        rows = torch.zeros(2, 100_000)
        rows[-1, [case.words[0] for case in cases]] = 1.0
        return {("everything", 1.0): rows, ("SnapKV", 0.5): -rows}

    cases, hidden = [], real_kv.hidden
    monkeypatch.setattr(real_kv, "hidden", lambda *given: cases.append(hidden(*given)) or cases[-1])
    monkeypatch.setattr(real_kv, "tails", logits)
    asked = [
        "--tables",
        "needle",
        "--cases",
        "2",
        "--prompt",
        "400",
        "--methods",
        "SnapKV",
        "--shares",
        "0.5",
    ]
    table = real_kv.kv([*tiny_kv, *asked])
    assert "per cent; 100 with everything kept" in table
    assert table.splitlines()[-1] == "| SnapKV | 0 |"


def test_llama_cpp_serves_without_repacked_weights_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(environments, "program", Path)
    asked = Namespace(threads=2, unified=False, slots=4, kv_tokens=64, no_repack=False)
    plain = serve_pair.theirs(asked, Path("m.gguf"), 1)
    asked.no_repack = True
    assert serve_pair.theirs(asked, Path("m.gguf"), 1) == [*plain, "--no-repack"]


def test_a_part_that_cannot_read_its_data_says_so_in_one_line(tmp_path, monkeypatch):
    asked = ["real.py", "--parts", "kv", "--tables", "eviction", "--data", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*asked, "--methods", "Reread", "--shares", "0.01"])
    monkeypatch.setattr(real_kv, "MODEL", str(tmp_path / "none"))
    with pytest.raises(SystemExit, match=r"^kv: .*none"):
        real.main()


VERB = ("-m", "attar.cli.main")
PARTS = [part for part in gpu.parts("attar:tiny") if part.command[:2] == VERB]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_options_of_the_verbs_that_a_device_runs(part):
    verb = part.command[2]
    known = {name for option in load_command(VERBS[verb][1])(verb).params for name in option.opts}
    assert {word for word in part.command[3:] if word.startswith("-")} <= known


def test_scripts_that_a_device_runs_are_there():
    root = Path(BENCHMARKS).parent
    scripts = [part.command[0] for part in gpu.parts("m") if part.command[0].endswith(".py")]
    assert scripts and all((root / script).is_file() for script in scripts)
