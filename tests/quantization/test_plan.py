"""Where schemes apply: overrides, sets that engines fuse, group sizes, and what the config says."""

import pytest
import torch

from attar.checkpoint import open_checkpoint
from attar.errors import ModelError, SettingsError
from attar.models.anatomy.parts import matches
from attar.quantization.plan import embedding_note, group_size, plan, static_inputs
from tests import tiny_models
from tests.quantization.packing import save, settings


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return open_checkpoint(save(tmp_path_factory.mktemp("llama") / "dense"))


def names(chosen):
    return {site.module: site.scheme.name for site in chosen.sites.values()}


def test_one_scheme_everywhere(llama):
    chosen = plan(llama, settings(scheme="W4A16", group_size=64))
    assert set(names(chosen).values()) == {"W4A16"} and len(chosen.sites) == 21
    assert list(chosen.sites) == [name for name in llama.tensors if name in chosen.sites]
    site = chosen.sites["model.layers.0.mlp.down_proj.weight"]
    assert site.shape == (128, 256) and site.scheme.weights.group_size == site.grid.group_size == 64
    assert site.grid.storage == torch.bfloat16
    assert chosen.ignore == ("lm_head",) == tuple(chosen.config["ignore"])
    assert list(chosen.config["config_groups"]) == ["group_0"]
    assert chosen.config["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert chosen.config["format"] == "pack-quantized"


def test_overrides_by_name_last_part_and_pattern(llama):
    overrides = (
        "re:(gate|up)_proj$=W3A16",
        "down_proj=W8A16",
        "model.layers.1.mlp.down_proj=FP8",
        "o_proj=dense",
    )
    got = names(plan(llama, settings(overrides=overrides)))
    assert got["model.layers.0.mlp.gate_proj"] == got["model.layers.2.mlp.up_proj"] == "W3A16"
    assert got["model.layers.0.mlp.down_proj"] == "W8A16"
    assert got["model.layers.1.mlp.down_proj"] == "FP8"
    assert "model.layers.0.self_attn.o_proj" not in got
    assert got["model.layers.0.self_attn.q_proj"] == "W4A16"


def test_the_last_override_decides_and_ignore_before_all(llama):
    chosen = plan(llama, settings(overrides=("down_proj=W8A16", "down_proj=W3A16"), ignore=("re:layers.0",)))
    got = names(chosen)
    assert got["model.layers.1.mlp.down_proj"] == "W3A16"
    assert not any(name.startswith("model.layers.0.") for name in got)


def test_assigned_schemes_come_before_overrides(llama):
    assigned = {"model.layers.0.mlp.down_proj": "W8A16", "model.layers.1.mlp.down_proj": "W8A16"}
    got = names(plan(llama, settings(overrides=("re:layers.1.*down=W2A16",)), assigned))
    assert got["model.layers.0.mlp.down_proj"] == "W8A16"
    assert got["model.layers.1.mlp.down_proj"] == "W2A16"
    assert got["model.layers.2.mlp.down_proj"] == "W4A16"
    with pytest.raises(ModelError, match=r"assigned to model.nowhere"):
        plan(llama, settings(), {"model.nowhere": "W4A16"})


def test_groups_of_the_config(llama):
    overrides = ("down_proj=FP8_DYNAMIC", "re:(q|k|v)_proj$=W8A16")
    config = plan(llama, settings(overrides=overrides)).config
    groups = list(config["config_groups"].values())
    assert config["format"] == "mixed-precision"
    assert groups[-1]["targets"] == ["Linear"] and groups[-1]["weights"]["num_bits"] == 4
    others = {group["weights"]["type"]: group for group in groups[:-1]}
    assert sorted(others["float"]["targets"]) == [f"model.layers.{i}.mlp.down_proj" for i in range(3)]
    assert others["float"]["format"] == "float-quantized" and len(others["int"]["targets"]) == 9


def test_schemes_of_one_layout_need_no_mixed_format(llama):
    assert plan(llama, settings(overrides=("down_proj=W8A16",))).config["format"] == "pack-quantized"


def test_a_main_scheme_that_nothing_has(llama):
    chosen = plan(llama, settings(overrides=("re:.=W8A16",)))
    groups = chosen.config["config_groups"]
    assert len(groups) == 1 and groups["group_0"]["targets"] == ["Linear"]


@pytest.mark.parametrize(
    ("changes", "setting", "parts"),
    [
        ({"overrides": ("k_proj=W8A16",)}, "overrides", ("q_proj=W4A16", "k_proj=W8A16", "q_proj|k_proj|v")),
        ({"overrides": ("gate_proj=W8A16",)}, "overrides", ("gate_proj=W8A16", "up_proj=W4A16")),
        ({"ignore": ("v_proj",)}, "ignore", ("q_proj=W4A16", "v_proj=dense")),
        ({"ignore": ("model.layers.1.mlp.up_proj",)}, "ignore", ("layers.1.mlp.gate_proj", "=dense")),
    ],
)
def test_what_engines_fuse_has_one_scheme(llama, changes, setting, parts):
    with pytest.raises(SettingsError) as raised:
        plan(llama, settings(**changes))
    assert raised.value.field == setting and "\n" not in raised.value.message
    assert all(part in raised.value.message for part in parts)


def test_assigned_schemes_that_split_a_set(llama):
    with pytest.raises(SettingsError) as raised:
        plan(llama, settings(), {"model.layers.2.self_attn.v_proj": "W8A16"})
    assert raised.value.field == "assigned" and "layers.2.self_attn.v_proj=W8A16" in raised.value.message


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("down_proj", "MODULE=SCHEME"),
        ("=W4A16", "MODULE=SCHEME"),
        ("down_proj=W4A61", "did you mean W4A16"),
        ("nowhere=W8A16", "some Linear's name matches"),
        ("re:(=W8A16", "regular expression"),
    ],
)
def test_wrong_overrides(llama, override, match):
    with pytest.raises(SettingsError, match=match):
        plan(llama, settings(overrides=(override,)))


def test_everything_ignored(llama):
    with pytest.raises(ModelError, match="every Linear is ignored"):
        plan(llama, settings(ignore=("re:.",)))


@pytest.mark.parametrize(
    ("scheme", "divisor"), [("FP8_BLOCK", 128), ("NF4", 64), ("NVFP4A16", 16), ("MXFP4A16", 32)]
)
def test_layers_that_a_format_does_not_fit_are_named(tmp_path, scheme, divisor):
    sizes = {"hidden_size": 128, "intermediate_size": 128 + divisor // 2}
    folder = tiny_models.save(tiny_models.build("llama3", **sizes), tmp_path / "dense")
    message = rf"model.layers.0.mlp.down_proj has {128 + divisor // 2} inputs, no multiple of {divisor}"
    with pytest.raises(SettingsError, match=message):
        plan(open_checkpoint(folder), settings(scheme=scheme))
    plan(open_checkpoint(folder), settings(scheme=scheme, ignore=("down_proj",)))


def test_group_sizes_of_each_scheme(tmp_path):
    folder = tiny_models.save(tiny_models.build("llama3"), tmp_path / "dense")  # 64 inputs, down_proj 96
    chosen = plan(open_checkpoint(folder), settings(group_size=-1, overrides=("down_proj=W8A16",)))
    sizes = {site.module.rpartition(".")[2]: site.grid.group_size for site in chosen.sites.values()}
    assert sizes["down_proj"] == 32 and sizes["up_proj"] == 64
    with pytest.raises(SettingsError, match=r"down_proj has 96 .* 32 or 16 fits"):
        plan(open_checkpoint(folder), settings(group_size=64))
    assert group_size({"a": (1, 7)}, -1) == 0


def test_nf4_stands_alone(llama):
    for changes, field in (
        ({"overrides": ("down_proj=W4A16",)}, "scheme"),
        ({"embedding_bits": 8}, "embedding_bits"),
        ({"kv_cache": "fp8"}, "kv_cache"),
    ):
        with pytest.raises(SettingsError) as raised:
            plan(llama, settings(scheme="NF4", **changes))
        assert raised.value.field == field
    with pytest.raises(SettingsError, match="belongs to NF4"):
        plan(llama, settings(double_quant=True))
    chosen = plan(llama, settings(scheme="NF4", double_quant=True, overrides=("o_proj=dense",)))
    assert chosen.config["quant_method"] == "bitsandbytes"
    assert "model.layers.0.self_attn.o_proj" in chosen.config["llm_int8_skip_modules"]
    assert all(site.grid.double for site in chosen.sites.values())


def test_what_calibration_must_find(llama):
    chosen = plan(llama, settings(scheme="FP8", overrides=("down_proj=FP8_DYNAMIC",), kv_cache="fp8"))
    wanted = static_inputs(list(chosen.sites.values()))
    assert len(wanted) == 18 and not any("down_proj" in name for name in wanted)
    assert sorted(chosen.caches.values()) == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert chosen.caches["model.layers.0.self_attn.k_proj.weight"] == "model.layers.0.self_attn"
    dynamic = plan(llama, settings(kv_cache="int8"))
    assert not dynamic.caches and dynamic.kv_cache.group_size == 16
    assert dynamic.config["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 16,
        "dynamic": True,
    }


def test_a_kv_cache_that_is_not_there(llama, tmp_path):
    with pytest.raises(SettingsError, match="kv_cache is 'fp4'"):
        plan(llama, settings(kv_cache="fp4"))
    folder = tiny_models.save(tiny_models.build("bert"), tmp_path / "bert")
    with pytest.raises(SettingsError, match="bert keeps no keys and values"):
        plan(open_checkpoint(folder), settings(kv_cache="fp8"))


def test_tied_int8_heads_are_targets_and_not_ignored(tmp_path):
    tied = open_checkpoint(save(tmp_path / "tied", tie_word_embeddings=True))
    config = plan(tied, settings(embedding_bits=8)).config
    assert config["ignore"] == [] and config["format"] == "mixed-precision"
    assert config["config_groups"]["group_0"]["targets"] == ["Embedding", r"re:.*lm_head$"]
    untied = open_checkpoint(save(tmp_path / "untied"))
    assert plan(untied, settings(embedding_bits=8)).config["ignore"] == ["lm_head"]


def test_decoding_while_loading_is_asked_for_where_transformers_needs_it(llama, tmp_path):
    def asks(checkpoint, **changes):
        return plan(checkpoint, settings(**changes)).config.get("dequantize", False)

    single = open_checkpoint(save(tmp_path / "float32", dtype=torch.float32))
    assert asks(llama, scheme="W4A16_ASYM") and asks(single, scheme="NVFP4A16")
    assert not asks(llama, scheme="NVFP4A16") and not asks(llama, scheme="W4A16")
    assert not asks(single, scheme="MXFP4A16", kv_cache="fp8")
    assert not asks(llama, scheme="W4A16_ASYM", overrides=("down_proj=W8A16",))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("a.b.c", True), ("c", True), ("b.c", True), ("b", False), ("re:^a", True), ("re:^b", False)],
)
def test_patterns(pattern, expected):
    assert matches("a.b.c", pattern) is expected


@pytest.mark.parametrize(("changes", "said"), [({"scheme": "W4A16"}, True), ({"embedding_bits": 8}, False)])
def test_an_embedding_that_is_much_of_the_result_is_worth_a_line(llama, changes, said):
    chosen = plan(llama, settings(**changes))
    note = embedding_note(llama, chosen)
    assert bool(note) == said and ("embed_tokens.weight stays as it is" in note) == said


def test_a_small_embedding_is_not(llama, monkeypatch):
    monkeypatch.setattr("attar.quantization.plan.LARGE", 0.9)
    assert embedding_note(llama, plan(llama, settings())) == ""
