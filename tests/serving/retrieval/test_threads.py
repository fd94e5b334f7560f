"""Searches in threads while another thread changes the index: each sees a change whole or not at all."""

import threading
from typing import Any

import pytest
import torch

from recshard_lab.serving.retrieval import CandidateIndex, ExactIndex
from recshard_lab.serving.retrieval.shared_lock import SharedLock
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


def test_threads_add_their_own_items() -> None:
    for kind in ("exact", "ivf", "hnsw"):
        index: CandidateIndex = MAKERS[kind](torch.randn(160, 4), torch.arange(160))

        def add(thread: int, index: CandidateIndex = index) -> None:
            for step in range(20):
                index.add(torch.ones(3, 4), 1000 * thread + 10 * step + torch.arange(3))

        threads = [threading.Thread(target=add, args=(n,)) for n in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(index) == len(index.ids().unique()) == 160 + 3 * 20 * 3
        if kind != "hnsw":  # a walk does not reach all of many equal vectors
            assert int(index.search(torch.ones(4), 340).counts) == 340


def test_a_writer_waits_for_readers_and_readers_for_a_writer() -> None:
    lock, seen = SharedLock(), list[str]()
    reading, release = threading.Event(), threading.Event()

    def read() -> None:
        with lock.shared():
            reading.set()
            release.wait()
            seen.append("read")

    def write() -> None:
        with lock.alone():
            seen.append("write")

    reader, writer = threading.Thread(target=read), threading.Thread(target=write)
    reader.start()
    reading.wait()
    writer.start()
    while not lock._writers:
        pass
    late = threading.Thread(target=lambda: (lock.shared().__enter__(), seen.append("late")))
    late.start()
    late.join(0.02)
    assert late.is_alive()
    assert seen == []
    release.set()
    for thread in (reader, writer, late):
        thread.join()
    assert seen == ["read", "write", "late"]
