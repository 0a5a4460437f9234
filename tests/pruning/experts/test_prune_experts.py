"""Experts pruned and merged: statistics against a plain version, cut models against masked ones."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import attar
from attar.checkpoint.open import open_checkpoint
from attar.errors import ModelError, SettingsError
from attar.models.loading.load import load_model
from attar.pruning.experts.grouping import (
    SCORES,
    ExpertGroups,
    average_linkage,
    keep_best,
    merge_similar,
)
from attar.pruning.experts.mixtures import expert_modules
from attar.pruning.experts.prune import masked_experts
from attar.pruning.experts.statistics import ExpertStatistics, collect_statistics
from attar.pruning.settings import prune_settings
from attar.pruning.task import calibration
from tests import tiny_models

EXPERTS, ACTIVE = 6, 2
SIZE = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZE |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
SIZE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "num_experts_per_tok": ACTIVE}
SMALL = {"moe_intermediate_size": 16}
GROUPED = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
DEEPSEEK = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
KINDS = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen3Moe": {"num_experts": EXPERTS, "norm_topk_prob": True, **SMALL},
    "Qwen2Moe": {"num_experts": EXPERTS, "shared_expert_intermediate_size": 24, **SMALL},
    "Olmoe": {"num_experts": EXPERTS},
    "GraniteMoe": {"num_local_experts": EXPERTS},
    "Glm4Moe": {"n_routed_experts": EXPERTS, "head_dim": 8, **GROUPED, **SMALL},
    "DeepseekV3": {"n_routed_experts": EXPERTS, "num_key_value_heads": 4, **GROUPED, **SMALL, **DEEPSEEK},
}
TEXT = {"samples": 4, "sequence_length": 24, "batch_size": 2, "data": "python-stdlib"}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The folder of a tiny mixture of a family, made once."""
    made = {}

    def folder(kind):
        if kind not in made:
            config = getattr(transformers, f"{kind}Config")(**{**SIZE, **KINDS[kind]})
            model = tiny_models.randomize(getattr(transformers, f"{kind}ForCausalLM")(config))
            for name, buffer in model.named_buffers():
                if "correction" in name:
                    buffer.copy_(0.1 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1)))
            made[kind] = tiny_models.save(model, tmp_path_factory.mktemp(kind) / "model")
        return made[kind]

    return folder


def prune(folder, out, **options):
    return attar.prune(folder, out, method="experts", **TEXT, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_cut_mixture_is_loaded_by_transformers_and_computes_what_the_masked_one_does(
    mixture, kind, tmp_path
):
    folder = mixture(kind)
    result = prune(folder, tmp_path / "out", experts=4, criterion="frequency")
    cut = AutoModelForCausalLM.from_pretrained(result.path, dtype=torch.float32).eval()
    layers = result.card.details["layers"]
    assert all(len(layer["experts"]) == 4 for layer in layers)
    whole = load_model(folder)
    groups = [ExpertGroups(tuple(map(tuple, layer["experts"])), ((1.0,),) * 4) for layer in layers]
    rows = tiny_models.tokens(whole, batch=2, length=9)
    with torch.no_grad():
        with masked_experts(whole, groups, EXPERTS):
            wanted = whole(rows).logits
        torch.testing.assert_close(cut(rows).logits, wanted, atol=2e-5, rtol=1e-4)
        assert (wanted - whole(rows).logits).abs().max() > 1e-3  # the mask masks, and is gone


@pytest.mark.slow
def test_tensors_of_experts_that_stay_are_the_originals(mixture, tmp_path):
    folder = mixture("Qwen3Moe")
    result = prune(folder, tmp_path / "out", ratio=0.5)
    old, new = load_file(folder / "model.safetensors"), load_file(result.path / "model.safetensors")
    for layer, report in enumerate(result.card.details["layers"]):
        prefix = f"model.layers.{layer}.mlp."
        stay = [members[0] for members in report["experts"]]
        assert torch.equal(new[f"{prefix}gate.weight"], old[f"{prefix}gate.weight"][stay])
        for number, expert in enumerate(stay):
            for part in ("gate_proj", "up_proj", "down_proj"):
                name = f"{prefix}experts.{{}}.{part}.weight"
                assert torch.equal(new[name.format(number)], old[name.format(expert)])
    assert len(new) == len(old) - 2 * 3 * 3
    config = json.loads((result.path / "config.json").read_text())
    assert config.get("num_experts", config.get("num_local_experts")) == 3
    assert result.card.details["kept"]["criterion"] == "reap"


def plain_statistics(folder, rows):
    """Of the last layer of a Qwen3-MoE, with its weights as the checkpoint stores them, token by token."""
    tensors = load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    entering = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda _, args: entering.append(args[0]))
    with torch.no_grad():
        model(rows)
    weight = lambda e, part: tensors[f"model.layers.1.mlp.experts.{e}.{part}_proj.weight"].double()  # noqa: E731
    frequency, gates, activation = (torch.zeros(EXPERTS, dtype=torch.float64) for _ in range(3))
    means = torch.zeros(EXPERTS, 32, dtype=torch.float64)
    tokens = entering[0].reshape(-1, 32).double()
    for x in tokens:
        shares = torch.softmax(tensors["model.layers.1.mlp.gate.weight"].double() @ x, 0)
        chosen = shares.argsort(descending=True)[:ACTIVE]
        for e in range(EXPERTS):
            f = weight(e, "down") @ (F.silu(weight(e, "gate") @ x) * (weight(e, "up") @ x))
            means[e] += f / len(tokens)
            if e in chosen:
                g = shares[e] / shares[chosen].sum()
                frequency[e] += 1
                gates[e] += g
                activation[e] += g * f.norm()
    return frequency, gates, activation / frequency.clamp(min=1), means


def test_statistics_are_those_of_a_plain_version(mixture):
    folder = mixture("Qwen3Moe")
    model = load_model(folder)
    rows = tiny_models.tokens(model, batch=2, length=11)
    got = collect_statistics(model, EXPERTS, [rows[:1], rows[1:]], means=True)[1]
    wanted = plain_statistics(folder, rows)
    assert got.frequency.sum() == ACTIVE * rows.numel()
    for ours, plain in zip((got.frequency, got.gates, got.saliency, got.outputs), wanted, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


def test_scores_are_means_and_sums_over_the_tokens_that_chose_an_expert():
    of = ExpertStatistics(
        torch.tensor([4.0, 1.0, 2.0]), torch.tensor([2.0, 0.9, 0.2]), torch.tensor([1.0, 3.0, 1.25])
    )
    order = {name: torch.argsort(score(of), descending=True).tolist() for name, score in SCORES.items()}
    wanted = {"reap": [1, 2, 0], "output": [0, 1, 2], "frequency": [0, 2, 1], "gates": [0, 1, 2]}
    assert torch.equal(SCORES["output"](of), torch.tensor([4.0, 3.0, 2.5]))
    assert order == wanted


@pytest.mark.slow
def test_merged_experts_are_weighted_means_and_similar_ones_join(mixture, tmp_path):
    folder = mixture("Mixtral")
    result = prune(folder, tmp_path / "out", experts=4, criterion="cluster")
    old, new = load_file(folder / "model.safetensors"), load_file(result.path / "model.safetensors")
    model = load_model(folder)
    batches = calibration(open_checkpoint(folder), prune_settings(method="experts", **TEXT))
    statistics = collect_statistics(model, EXPERTS, batches, norms=False, means=True)
    for layer, report in enumerate(result.card.details["layers"]):
        members = report["experts"]
        assert sorted(e for group in members for e in group) == list(range(EXPERTS))
        for number, group in enumerate(members):
            counts = statistics[layer].frequency[group].float()
            shares = counts / counts.sum()
            for name in ("experts.{}.w1.weight", "experts.{}.w2.weight"):
                prefix = f"model.layers.{layer}.block_sparse_moe."
                wanted = sum(s * old[prefix + name.format(e)] for s, e in zip(shares, group, strict=True))
                torch.testing.assert_close(new[prefix + name.format(number)], wanted, atol=1e-6, rtol=1e-5)
            gate = old[f"{prefix}gate.weight"][group]
            row = new[f"{prefix}gate.weight"][number]
            torch.testing.assert_close(row, (shares[:, None] * gate).sum(0), atol=1e-6, rtol=1e-5)


def test_equal_experts_join_and_the_mixture_stays_what_it_was(mixture, tmp_path):
    folder = mixture("Qwen3Moe")
    tensors = load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        for parameter in (*layer.mlp.experts.parameters(), layer.mlp.gate.weight):
            parameter.data[3:] = parameter.data[:3]
    twice = tiny_models.save(model, tmp_path / "twice")
    result = prune(twice, tmp_path / "out", experts=3, active=1, criterion="cluster")
    assert [layer["experts"] for layer in result.card.details["layers"]] == [[[0, 3], [1, 4], [2, 5]]] * 2
    # a token's two best were the two copies of one expert: now that one alone
    merged = AutoModelForCausalLM.from_pretrained(result.path, dtype=torch.float32)
    rows = tiny_models.tokens(model, batch=1, length=8)
    with torch.no_grad():
        torch.testing.assert_close(merged(rows).logits, model.eval()(rows).logits, atol=1e-4, rtol=1e-3)
    assert len(tensors) > len(load_file(result.path / "model.safetensors"))


def test_fewer_active_experts_are_a_number_in_the_config(mixture, tmp_path):
    folder = mixture("Olmoe")
    result = prune(folder, tmp_path / "out", ratio=0.0, active=1)
    before, after = load_file(folder / "model.safetensors"), load_file(result.path / "model.safetensors")
    assert set(before) == set(after) and all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((result.path / "config.json").read_text())["num_experts_per_tok"] == 1
    model = load_model(result.path)
    chosen = []
    next(iter(expert_modules(model).values())).register_forward_pre_hook(
        lambda _, args: chosen.append(args[1])
    )
    model(tiny_models.tokens(model, batch=1, length=5))
    assert chosen[0].shape == (5, 1)


def lance_williams(distances, keep):
    """The same clusters by the update of distances: d(k, ij) = (n_i d(k, i) + n_j d(k, j)) / (n_i + n_j)."""
    D = {
        (i, j): float(distances[i, j]) for i in range(len(distances)) for j in range(len(distances)) if i != j
    }
    members = {i: (i,) for i in range(len(distances))}
    while len(members) > keep:
        i, j = min((pair for pair in D if pair[0] < pair[1]), key=D.__getitem__)
        n, m = len(members[i]), len(members[j])
        for k in members.keys() - {i, j}:
            D[i, k] = D[k, i] = (n * D[i, k] + m * D[j, k]) / (n + m)
        members[i] += members.pop(j)
        D = {pair: distance for pair, distance in D.items() if j not in pair}
    return sorted(tuple(sorted(group)) for group in members.values())


def test_average_linkage_is_that_of_lance_and_williams():
    for seed in range(20):
        points = torch.randn(9, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        distances = torch.cdist(points, points)
        assert average_linkage(distances, 1 + seed % 8) == lance_williams(distances, 1 + seed % 8)


def test_groups_by_hand():
    scores = torch.tensor([0.1, 3.0, 2.0, 2.0])
    assert keep_best(scores, 2) == ExpertGroups(((1,), (2,)), ((1.0,), (1.0,)))
    outputs = torch.tensor([[0.0], [5.0], [0.1], [9.0]])
    frequency = torch.tensor([30.0, 1.0, 10.0, 0.0])
    groups = merge_similar(outputs, frequency, 3)
    assert groups.members == ((0, 2), (1,), (3,)) and groups.weights[0] == (0.75, 0.25)
    assert groups.removed(4) == [] and keep_best(scores, 3).removed(4) == [0]
    assert merge_similar(outputs, 0 * frequency, 3).weights[0] == (0.5, 0.5)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 7}, "experts is 7, but must be 1 to 6"),
        ({"experts": 2, "active": 3}, "active is 3, but must be 1 to 2"),
        ({"experts": 1}, "active is 2, but must be 1 to 1"),
        ({"ratio": 0.0}, "--active"),
        ({"criterion": "wanda"}, "auto, reap, output, frequency, gates or cluster"),
        ({"reconstruct": "linear"}, "attar recover"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(mixture, options, message, tmp_path):
    with pytest.raises(SettingsError) as caught:
        prune(mixture("Mixtral"), tmp_path / "out", **options)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_what_is_no_mixture_is_refused_by_name(tmp_path):
    folder = tiny_models.save(tiny_models.build("llama2"), tmp_path / "dense")
    with pytest.raises(ModelError, match="llama: is no mixture of experts"):
        prune(folder, tmp_path / "out")
