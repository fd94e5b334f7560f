"""Checkpoints that someone crafted, checksums included: refused before anything is allocated or changed."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from recshard_lab import load_checkpoint, save_checkpoint
from recshard_lab.complete_folders import MANIFEST
from recshard_lab.distributed import load_pretrained
from recshard_lab.distributed.state.checkpoint import read_extra
from recshard_lab.saved.files import CHECKPOINT, CheckpointError
from recshard_lab.saved.reader import tiles
from tests.distributed.state_jobs import blocks_of
from tests.distributed.test_checkpoint import small, weights
from tests.forged import forged, resign

WEIGHT = "model.embedding_bags.t.weight"


def crafted(folder: Path, edit: Callable[[Any], Any]) -> Path:
    """A checkpoint of several chunks whose metadata was edited and signed again."""
    with blocks_of(640):
        save_checkpoint(folder / "run", small(), extra={"epoch": 3})
    metadata = pickle.loads((folder / "run" / ".metadata").read_bytes())
    assert len(metadata.state_dict_metadata[WEIGHT].chunks) == 3
    edited = edit(metadata)
    content = pickle.dumps(metadata if edited is None else edited)
    return forged(folder / "run", folder / "evil", {".metadata": content}, CHECKPOINT)


def weight(metadata: Any) -> Any:
    return metadata.state_dict_metadata[WEIGHT]


def chunk(metadata: Any, name: str = WEIGHT) -> Any:
    return metadata.state_dict_metadata[name].chunks[0]


def place(metadata: Any, name: str = WEIGHT) -> Any:
    return next(where for index, where in metadata.storage_data.items() if index.fqn == name)


def drop_chunk(metadata: Any) -> None:
    del weight(metadata).chunks[1]


def repeat_chunk(metadata: Any) -> None:
    weight(metadata).chunks.append(chunk(metadata))


def move_chunk(metadata: Any) -> None:
    weight(metadata).chunks[0] = ChunkStorageMetadata(torch.Size([1, 0]), chunk(metadata).sizes)


def huge_extra(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["extra"]
    entry.size = torch.Size([2**45])
    entry.chunks[:] = [ChunkStorageMetadata(torch.Size([0]), torch.Size([2**45]))]


def drop_section(name: str) -> Callable[[Any], None]:
    def edit(metadata: Any) -> None:
        del metadata.state_dict_metadata[name]

    return edit


def extra_as_floats(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["extra"]
    entry.properties = replace(entry.properties, dtype=torch.float32)


def settings_are_extra(metadata: Any) -> None:
    found = metadata.state_dict_metadata
    found["settings"], found["extra"] = found["extra"], found["settings"]
    moved = {}
    for index, where in metadata.storage_data.items():
        fqn = {"settings": "extra", "extra": "settings"}.get(index.fqn, index.fqn)
        moved[replace(index, fqn=fqn)] = where
    metadata.storage_data = moved


def attribute(name: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata, name, value)


def of_weight(name: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(weight(metadata), name, value)


def of_chunk(name: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: object.__setattr__(chunk(metadata), name, value)


def of_place(name: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(place(metadata), name, value)


def path_of(name: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: metadata.planner_data.update({name: value})


EDITS: dict[str, Callable[[Any], Any]] = {
    "a chunk is missing": drop_chunk,
    "a chunk is there twice": repeat_chunk,
    "chunks overlap": move_chunk,
    "extra claims 2^45 bytes": huge_extra,
    "no extra": drop_section("extra"),
    "no settings": drop_section("settings"),
    "no weights": drop_section(WEIGHT),
    "extra is of floats": extra_as_floats,
    "settings are something else": settings_are_extra,
    "no tensors": attribute("state_dict_metadata", {}),
    "tensors are None": attribute("state_dict_metadata", None),
    "places are None": attribute("storage_data", None),
    "a path is a number": path_of(WEIGHT, 3),
    "a path is empty": path_of(WEIGHT, ()),
    "a path is long": path_of(WEIGHT, ("model", "a", "b")),
    "a size is None": of_weight("size", None),
    "a size is text": of_weight("size", "ab"),
    "no number format": of_weight("properties", None),
    "chunks are None": of_weight("chunks", None),
    "no chunks": of_weight("chunks", []),
    "a chunk has one axis": of_chunk("sizes", torch.Size([20])),
    "a chunk is beyond the file": of_place("offset", 10**9),
    "a chunk is too short": of_place("length", 10),
    "a chunk is of another file": of_place("relative_path", "../run/__0_0.distcp"),
    "a chunk has no length": of_place("length", None),
    "another object": lambda metadata: torch.Size([1]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_crafted_metadata_is_refused_and_nothing_changes(tmp_path: Path, edit: str) -> None:
    evil = crafted(tmp_path, EDITS[edit])
    module = small(3)
    before = weights(module)
    with pytest.raises(CheckpointError):
        load_checkpoint(evil, module)
    assert torch.equal(weights(module), before)
    if "extra" in edit:
        with pytest.raises(CheckpointError):
            read_extra(evil)


@pytest.mark.parametrize("edit", ["a chunk is missing", "chunks overlap", "a chunk is beyond the file"])
def test_a_pretrained_table_from_crafted_metadata_is_refused(tmp_path: Path, edit: str) -> None:
    module = small(3)
    before = weights(module)
    with pytest.raises(CheckpointError, match="damaged"):
        load_pretrained(module, {"t": (crafted(tmp_path, EDITS[edit]), WEIGHT)})
    assert torch.equal(weights(module), before)


@pytest.mark.parametrize(
    "files_of",
    [
        lambda listed: None,
        lambda listed: {name: {"bytes": "many", "sha256": 5} for name in listed},
        lambda listed: {name: entry for name, entry in listed.items() if name != ".metadata"},
    ],
    ids=["nothing", "wrong types", "no metadata"],
)
def test_a_crafted_manifest_is_refused(tmp_path: Path, files_of: Callable[[Any], Any]) -> None:
    save_checkpoint(tmp_path / "run", small())
    resign(tmp_path / "run", lambda manifest: {"files": files_of(manifest["files"])})
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "run", small())


def test_a_manifest_nested_too_deep_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "run", small())
    (tmp_path / "run" / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(tmp_path / "run", small())


@st.composite
def boxes(draw: Any) -> tuple[list[int], list[list[tuple[int, int]]]]:
    size = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    spans = [st.tuples(st.integers(0, n), st.integers(0, n)) for n in size]
    return size, [list(chunk) for chunk in draw(st.lists(st.tuples(*spans), max_size=4))]


@given(drawn=boxes())
def test_tiles_counts_every_cell(drawn: Any) -> None:
    size, chunks = drawn
    count = torch.zeros(size, dtype=torch.int64)
    inside = True
    for one in chunks:
        inside &= all(start + extent <= n for (start, extent), n in zip(one, size, strict=True))
        count[tuple(slice(start, start + extent) for start, extent in one)] += 1
    assert tiles(size, chunks) == (inside and bool((count == 1).all()))
