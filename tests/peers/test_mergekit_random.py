"""DARE and DELLA against mergekit. Its masks come from torch's generator, ours from a stream for each tensor:
compared are the statistics of the masks, and the mean over many seeds."""

import math

import pytest
import torch

import attar
from tests.peers.mergekit_peer import MISSING, case, configured, little, mergekit, one_thread, stored, write

__all__ = ["one_thread"]  # a fixture
pytestmark = pytest.mark.peers
if MISSING:
    pytest.skip("no $ATTAR_PEERS/mergekit", allow_module_level=True)

SEEDS = 32
RANDOM = {
    "dare_linear": {"density": 0.3},
    "dare_ties": {"density": 0.3},
    "della": {"density": 0.5, "epsilon": 0.2},
    "della_linear": {"density": 0.5, "epsilon": 0.2},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A base of 0.2 M parameters and two models that differ from it, in float32."""
    work, model = tmp_path_factory.mktemp("small"), little()
    for name in ("BASE", "ONE", "TWO"):
        write(model, work / name)
        with torch.no_grad():
            for (
                parameter
            ) in model.parameters():  # uneven: rescaling by the L1 norm differs from one over density
                parameter.add_(torch.randn_like(parameter) ** 3 * 1e-3)
    return {name: work / name for name in ("BASE", "ONE", "TWO")}


@pytest.fixture(scope="module")
def drawn(small, tmp_path_factory):
    """Merges of both tools: (method, number of models, tool) to a list of checkpoints, one for each seed."""
    work = tmp_path_factory.mktemp("drawn")
    runs, actual = [], {}
    for method, item in RANDOM.items():
        for count in (1, 2):
            names = ("one", "two")[:count]
            result = case(method, *names, base="BASE", each={"weight": 1.0, **item}).text
            file = work / f"{method}-{count}.yml"
            file.write_text(configured(result, "float32", small))
            outs = {
                tool: [work / f"{tool}-{method}-{count}-{i}" for i in range(SEEDS)] for tool in ("a", "m")
            }
            runs += [{"config": str(file), "out": str(out), "seed": i} for i, out in enumerate(outs["m"])]
            for seed, out in enumerate(outs["a"]):
                attar.merge(file, out, seed=seed)
            actual |= {(method, count, tool): item for tool, item in outs.items()}
    for line in mergekit(runs):
        assert "error" not in line, line
    return actual


def deltas(outs, base, tensor):
    """What merges added to the base: (seeds, numbers)."""
    return torch.stack([stored(out)[tensor].flatten() - base[tensor].flatten() for out in outs])


TENSORS = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.self_attn.q_proj.weight",
)


@pytest.mark.parametrize("method", RANDOM)
def test_masks_of_random_merges_have_mergekits_statistics(method, small, drawn):
    base, one = stored(small["BASE"]), stored(small["ONE"])
    given = RANDOM[method]
    for tensor in TENSORS:
        d = one[tensor] - base[tensor]
        size = d.numel()
        ranks = d.abs().argsort(dim=-1).argsort(dim=-1).flatten()
        upper = ranks >= d.shape[-1] // 2
        for tool in ("a", "m"):
            added = deltas(drawn[method, 1, tool], base, tensor)
            kept = added.abs() > 1e-9  # |base + d - base| of a kept d is at least that
            seen = d.flatten().abs() > 1e-7
            wanted = given["density"]
            spread = 6 * math.sqrt(wanted * (1 - wanted) / int(seen.sum()) / SEEDS)
            if "epsilon" not in given:  # every place is as likely: not only the mean but each seed and place
                assert kept[:, seen].float().mean() == pytest.approx(wanted, abs=spread), (tool, tensor)
                assert kept[:, seen & upper].float().mean() == pytest.approx(wanted, abs=2 * spread)
            else:  # density + epsilon / 2 for the larger half of a row, density - epsilon / 2 for the smaller
                shares = [float(kept[:, seen & half].float().mean()) for half in (upper, ~upper)]
                high, low = (wanted + sign * given["epsilon"] / 2 for sign in (1, -1))
                assert shares[0] == pytest.approx(high, abs=0.01), (tool, tensor)
                assert shares[1] == pytest.approx(low, abs=0.02), (tool, tensor)
            # the L1 norm of what is kept is that of the task vector, at every seed
            norms = added.abs().sum(-1) / d.abs().sum()
            assert (norms - 1).abs().max() < 1e-4, (tool, tensor, norms)
            # masks of two seeds have nothing in common
            first, second = (kept[i, seen].float() - kept[i, seen].float().mean() for i in (0, 1))
            alike = float((first * second).mean() / (first.std() * second.std()))
            allowed = 0.2 if "epsilon" in given else 6 / math.sqrt(size)
            assert abs(alike) < allowed, (tool, tensor, alike)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("method", RANDOM)
def test_the_mean_of_random_merges_over_seeds_is_mergekits(method, count, small, drawn):
    base = stored(small["BASE"])
    ratios = []
    for tensor in TENSORS:
        ours, theirs_ = (deltas(drawn[method, count, tool], base, tensor).double() for tool in ("a", "m"))
        variance = (ours.var(0) + theirs_.var(0)) / SEEDS
        seen = variance > 1e-18
        squares = (ours.mean(0) - theirs_.mean(0))[seen] ** 2
        ratios.append(float((squares / variance[seen]).mean()))
        shares = (ours.var(0) / (ours.var(0) + theirs_.var(0)))[seen]
        assert float(shares.mean()) == pytest.approx(0.5, abs=0.02), tensor
    # t^2 of two samples of one distribution: its mean is n / (n - 2) with n degrees of freedom
    freedom = 2 * (SEEDS - 1)
    assert ratios == pytest.approx([freedom / (freedom - 2)] * len(TENSORS), abs=0.12)
