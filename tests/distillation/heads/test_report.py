"""The report of a head: means of what is known, and tokens of whole chains."""

import pytest
import torch

from attar.distillation.heads.report import DraftedChains, drafting_report


def test_a_report_counts_whole_chains_and_known_drafts():
    nan = float("nan")
    first = DraftedChains(torch.tensor([[0.5, 0.4], [1.0, nan]]), torch.tensor([[1.0, 0.0], [0.0, nan]]))
    second = DraftedChains(torch.tensor([[0.9, 1.0]]), torch.tensor([[1.0, 1.0]]))
    joined = DraftedChains.joined([first, second])
    report = drafting_report(joined)
    assert report["chains"] == 2 and joined.confidence is None
    assert report["acceptance"] == pytest.approx([0.8, 0.7])
    assert report["agreement"] == pytest.approx([2 / 3, 0.5], abs=1e-4)
    assert report["tokens_a_pass"] == pytest.approx(1 + (0.5 + 0.2 + 0.9 + 0.9) / 2)
    assert report["tokens_a_pass_greedy"] == pytest.approx(1 + (1 + 0 + 1 + 1) / 2)


def test_nothing_drafted_is_one_token_a_pass():
    nothing = DraftedChains(torch.full((3, 2), float("nan")), torch.full((3, 2), float("nan")))
    assert drafting_report(nothing)["tokens_a_pass"] == 1.0
    assert drafting_report(nothing)["acceptance"] == [0.0, 0.0]
