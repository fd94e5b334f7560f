"""Recall against counts by hand; rows for each setting, and settings as before."""

import pytest
import torch

from recshard_lab.serving.retrieval import recall_of, recall_of_clicks


def test_recall_counts_what_was_found() -> None:
    exact = torch.tensor([[5, 6, 7], [8, 9, 1]])
    assert recall_of(torch.tensor([[6, 5, 0], [9, 2, 3]]), exact) == 0.5
    assert recall_of(torch.tensor([[5, 6, 7, 0], [1, 9, 8, 0]]), exact) == 1.0
    clicks = [torch.tensor([6]), torch.tensor([2, 8, 4])]
    assert recall_of_clicks(torch.tensor([[6, 5, 0], [9, 2, 3]]), clicks) == 0.5
    with pytest.raises(ValueError, match=r"got \[1, 3\] and \[2, 3\]"):
        recall_of(exact[:1], exact)
    with pytest.raises(ValueError, match="clicks has 1 entries with 2 clicks for 2 queries"):
        recall_of_clicks(exact, [torch.tensor([1, 2])])
