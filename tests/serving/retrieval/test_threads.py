"""Searches in threads while another thread changes the index: each sees a change whole or not at all."""

import threading
from typing import Any

import pytest
import torch

from recshard_lab.serving.retrieval import ExactIndex
from tests.serving.retrieval.spaces import MAKERS

ROUNDS = 40


@pytest.mark.parametrize("kind", MAKERS)
def test_each_search_sees_whole_changes(kind: str) -> None:
    """Pairs of items change together, so that their scores are equal in every state."""
    torch.manual_seed(0)
    vectors = torch.randn(300, 4) * 0.01
    index = MAKERS[kind](vectors, torch.arange(300))
    pair = torch.tensor([500, -500])
    index.add(torch.ones(2, 4), pair)
    stop, wrong, searched = threading.Event(), list[Any](), [0, 0]

    def search(thread: int) -> None:
        while not stop.is_set():
            found = index.search(torch.ones(4), 2)
            pairs = found.ids.tolist() == [-500, 500] and len(found.scores.unique()) == 1
            if not pairs and found.ids.tolist() != near:
                wrong.append(found)
            searched[thread] += 1

    near = ExactIndex(vectors).search(torch.ones(4), 2).ids.tolist()
    threads = [threading.Thread(target=search, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    try:
        for step in range(ROUNDS):
            index.replace(torch.full((2, 4), 2.0 + step), pair)
            index.remove(pair)
            index.add(torch.full((2, 4), 1.0 + step), pair)
            before = searched.copy()
            while not wrong and any(n == m for n, m in zip(before, searched, strict=True)):
                stop.wait(0.0005)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert index.search(torch.ones(4), 2).scores.tolist() == [4.0 * ROUNDS] * 2
    assert len(index) == 302
