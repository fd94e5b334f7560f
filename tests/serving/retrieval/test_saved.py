"""A loaded index answers as the saved one; damaged folders are refused."""

import errno
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from recshard_lab.serving.retrieval import CandidateIndex, ExactIndex, FaissIndex, IndexFolderError, load_index
from tests.forged import resign
from tests.serving.retrieval.spaces import MAKERS, space

EVERY: dict[str, Any] = {
    **MAKERS,
    "float16": lambda v, i, **own: ExactIndex(v, i, storage="float16", **own),
    "int8": lambda v, i, **own: ExactIndex(v, i, storage="int8", **own),
    "ivf int8": lambda v, i, **own: FaissIndex(v, i, storage="int8", cells=2, nprobe=2, **own),
}


def changed(kind: str, metric: str = "inner_product") -> tuple[CandidateIndex, Any]:
    vectors, ids, queries = space()
    index = EVERY[kind](vectors[:150], ids[:150], metric=metric)
    index.metadata["model"] = "two_tower 7"
    index.add(vectors[150:], ids[150:])
    index.remove(ids[5:25])
    index.replace(queries[:2], ids[100:102])
    return index, queries


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("memory_map", [False, True])
def test_a_loaded_index_answers_as_the_saved_one(kind: str, memory_map: bool, tmp_path: Path) -> None:
    index, queries = changed(kind, "cosine")
    index.save(tmp_path / "7")
    loaded = load_index(tmp_path / "7", memory_map=memory_map)
    assert type(loaded) is type(index)
    for ours, theirs in zip(loaded.search(queries, 30), index.search(queries, 30), strict=True):
        if ours.is_floating_point():
            torch.testing.assert_close(ours, theirs)
        else:
            assert torch.equal(ours, theirs)
    assert (len(loaded), loaded.dim, loaded.metric, loaded.metadata) == (180, 8, "cosine", {"model": "two_tower 7"})
    assert torch.equal(loaded.ids(), index.ids())
    assert {path.name for path in tmp_path.iterdir()} == {"7"}


@pytest.mark.parametrize("kind", ["exact", "int8", "ivf", "hnsw"])
def test_a_mapped_index_changes_without_changing_its_file(kind: str, tmp_path: Path) -> None:
    index, queries = changed(kind)
    index.save(tmp_path / "7")
    files = {path: path.read_bytes() for path in (tmp_path / "7").iterdir()}
    mapped = load_index(tmp_path / "7", memory_map=True)
    best = mapped.search(queries, 3).ids.unique()
    mapped.remove(best)
    index.remove(best)
    assert torch.equal(mapped.search(queries, 20).ids, index.search(queries, 20).ids)
    if isinstance(mapped, FaissIndex):
        with pytest.raises(ValueError, match="1 vectors cannot be added: the index is memory-mapped and read-only"):
            mapped.add(queries[:1], best[:1])
    else:
        mapped.add(queries[:1], best[:1])
        assert int(best[0]) in mapped
    assert {path: path.read_bytes() for path in (tmp_path / "7").iterdir()} == files


@pytest.mark.parametrize("kind", ["exact", "ivf"])
def test_a_damaged_folder_is_refused_by_file(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "7"
    index, _ = changed(kind)
    index.save(folder)
    for path in sorted(folder.iterdir()):
        right = path.read_bytes()
        middle = len(right) // 2
        for wrong in (right[:-1], right[:middle] + bytes([right[middle] ^ 1]) + right[middle + 1 :], None):
            path.unlink()
            if wrong is not None:
                path.write_bytes(wrong)
            with pytest.raises(IndexFolderError, match=path.name):
                load_index(folder)
            path.write_bytes(right)
    load_index(folder)


def test_other_folders_and_versions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IndexFolderError, match=r"no saved index at .*absent. Fix: index.save\(path\) first"):
        load_index(tmp_path / "absent")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    index = ExactIndex(torch.eye(3))
    with pytest.raises(IndexFolderError, match="is not a saved index and is not replaced"):
        index.save(tmp_path / "other")
    index.save(tmp_path / "7")
    resign(tmp_path / "7", lambda manifest: {"version": 2})
    with pytest.raises(IndexFolderError, match="format version 2, but this recshard_lab reads version 1"):
        load_index(tmp_path / "7")
    index.save(tmp_path / "8")
    resign(tmp_path / "8", lambda manifest: {"index": {"kind": "parts", "parts": [manifest["index"]], "metadata": {}}})
    with pytest.raises(IndexFolderError, match=r"has an index of kind 'parts'. Supported: exact, faiss. Fix: "):
        load_index(tmp_path / "8")


@pytest.mark.parametrize(("kind", "limit"), [("exact", 500), ("flat", 1000), ("ivf", 1000)])
def test_a_full_disk_is_named_and_leaves_the_old_index(kind: str, limit: int, tmp_path: Path) -> None:
    """faiss 1.15 ignores an error when it closes a file: a part of a small index was written, and nothing raised."""
    vectors, ids, queries = space()
    index = EVERY[kind](vectors[:40], ids[:40])
    index.save(tmp_path / "7")
    expected = index.search(queries, 5).ids
    index.remove(expected.unique())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # the kernel refuses more, as a full disk does
    try:
        with pytest.raises(OSError, match=r"/7 could not be saved: File too large. Fix: free disk space") as full:
            index.save(tmp_path / "7")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert full.value.errno == errno.EFBIG
    assert torch.equal(load_index(tmp_path / "7").search(queries, 5).ids, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["7"]
