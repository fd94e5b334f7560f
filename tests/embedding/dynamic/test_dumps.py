"""Dumps of dynamic tables: whole ones and deltas, loaded at any size, and writers that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import recshard_lab as rs
from recshard_lab.embedding import EmbOptimType, RowWiseAdagrad
from recshard_lab.embedding.dynamic import row_files
from recshard_lab.embedding.dynamic.config import Tier
from recshard_lab.embedding.dynamic.row_files import DumpError
from recshard_lab.embedding.dynamic.stores.base import joined
from recshard_lab.sharding import EmbeddingModuleShardingPlan

OPTIMIZERS: dict[str, Any] = {"adam": EmbOptimType.ADAM, "row-wise": RowWiseAdagrad, "sgd": torch.optim.SGD}


def collection(optimizer: str = "adam", capacity: int = 1024, **more: Any) -> rs.DynamicEmbeddingBagCollection:
    more = {"evict": "lfu"} | more
    tables = [
        rs.DynamicEmbeddingConfig("user", 8, capacity, **more),
        rs.DynamicEmbeddingConfig("item", 4, capacity, data_type=rs.DataType.FP16, **more),
    ]
    return rs.DynamicEmbeddingBagCollection(tables, OPTIMIZERS[optimizer], {"lr": 0.1})


def batches(count: int, seed: int, spread: int = 1000, size: int = 300) -> Iterator[rs.KeyedJaggedTensor]:
    rng = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = (torch.randn(2 * size, generator=rng) * spread).long() * 7919
        yield rs.KeyedJaggedTensor(["user", "item"], ids, lengths=torch.full((2 * size // 3,), 3))


def train(module: Any, count: int, seed: int, **more: Any) -> None:
    module.train()
    for batch in batches(count, seed, **more):
        module(batch).values().pow(2).sum().backward()


def content(module: Any) -> dict[str, Any]:
    """Of each table ids, scores, steps, rows and states, in the order of ids, and everything but slots."""
    found: dict[str, Any] = {}
    for name, table in module.tables().items():
        index = table.index
        slots = index.slots()
        slots = slots[index.keys[slots].argsort()]
        found[f"{name}.ids"], found[f"{name}.accesses"] = index.keys[slots], index.accesses[slots]
        found[f"{name}.weight"] = table.weight[slots]
        found[f"{name}.step"] = torch.tensor([index.step, index.epoch])
        for state, tensor in table.states.items():
            found[f"{name}.{state}"] = tensor[slots] if len(tensor) == len(table.weight) else tensor.clone()
        if table.admission_counts is not None:
            counted = table.admission_counts
            at = counted.slots()[counted.keys[counted.slots()].argsort()]
            found[f"{name}.counts"] = torch.cat([counted.keys[at][:, None], counted.accesses[at]], dim=1)
    return found


def assert_same(one: Any, other: Any) -> None:
    expected, found = content(one), content(other)
    assert list(expected) == list(found)
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("admit", [None, 2])
def test_deltas_replayed_on_a_full_dump_give_the_same_tables(tmp_path: Path, optimizer: str, admit: int | None) -> None:
    spread = 1000 if admit is None else 250
    one = collection(optimizer, 512, admit=admit)
    train(one, 8, 0, spread=spread)
    one.dump(tmp_path / "0")
    rows = []
    for number in (1, 2, 3):
        train(one, 1, number, size=30, spread=spread)
        gone = one.table("user").index.keys[one.table("user").index.slots()[::9]]
        one.table("user").erase(gone[gone % 2 == 1])
        one.table("item").assign(one.table("item").index.keys[one.table("item").index.slots()[:1]], torch.ones(1, 4))
        dumped = one.dump(tmp_path / str(number), since=tmp_path / str(number - 1))
        rows.append(dumped.rows["user"])
        assert dumped.present["user"] == one.table("user").size
    assert one.table("user").counters.evictions > 0
    assert one.table("user").counters.erasures > 0
    assert 0 < max(rows) < 100 < one.table("user").size
    other = collection(optimizer, 512, admit=admit)
    train(other, 2, 99)  # what it has is removed
    restored = other.load([tmp_path / str(number) for number in range(4)])
    assert_same(one, other)
    assert restored.lost == {"user": 0, "item": 0}
    train(one, 4, 50)
    train(other, 4, 50)  # the same slots: it continues exactly
    assert_same(one, other)
    counters = other.table("user").counters
    assert counters.inserts - counters.evictions - counters.erasures == other.table("user").size


def test_a_delta_contains_rows_whose_backward_came_after_the_dump_before(tmp_path: Path) -> None:
    one, other = collection(), collection()
    train(one, 2, 0)
    (batch,) = batches(1, 5)
    out = one(batch).values()
    one.dump(tmp_path / "full")
    out.pow(2).sum().backward()
    one.dump(tmp_path / "delta", since=tmp_path / "full")
    other.load([tmp_path / "full", tmp_path / "delta"])
    assert_same(one, other)


@pytest.mark.parametrize("optimizer", ["adam", "row-wise"])
def test_a_smaller_table_keeps_the_highest_scores_and_hands_over_the_rest(tmp_path: Path, optimizer: str) -> None:
    one, small = collection(optimizer, 2048), collection(optimizer, 512)
    train(one, 8, 0)
    one.dump(tmp_path / "0")
    train(one, 1, 1, size=30)
    one.dump(tmp_path / "1", since=tmp_path / "0")
    source, target, lost = one.table("user"), small.table("user"), list[Any]()
    target.on_evict = lost.append
    restored = small.load(tmp_path / "0")
    first = joined(lost)
    restored = restored.then(small.load(tmp_path / "1"))
    assert target.load_factor > 0.9
    assert restored.lost["user"] == sum(len(rows.ids) for rows in lost) == target.counters.evictions > 500
    kept = target.index.keys[target.index.slots()]
    slots, there = source.slots_of(kept), target.slots_of(kept)
    assert torch.equal(source.weight[slots], target.weight[there])
    assert torch.equal(source.index.accesses[slots], target.index.accesses[there])
    second = joined(lost[1:])
    for name, state in target.states.items():
        if len(state) == len(target.weight):
            assert torch.equal(source.states[name][slots], state[there])
            assert torch.equal(source.states[name][source.slots_of(second.ids)], second.states[name])
    assert torch.equal(source.weight[source.slots_of(second.ids)], second.weight)
    # every lost id has a score that is at most the lowest of its buckets
    from recshard_lab.embedding.dynamic import index_rounds

    both, _, _ = index_rounds._places(second.ids, *target.index._shape[:3])
    by_bucket = target.index.scores.view(-1, 128).amin(dim=1)
    assert bool((second.scores[:, None] <= by_bucket[both]).all())
    assert len(first.ids) > len(second.ids) > 0


def test_a_larger_table_and_one_that_grows_have_every_row(tmp_path: Path) -> None:
    one = collection("adam", 1024)
    train(one, 8, 0)
    one.dump(tmp_path / "0")
    for module in (collection("adam", 8192), collection("adam", 128, max_capacity=4096)):
        assert module.load(tmp_path / "0").lost == {"user": 0, "item": 0}
        assert_same(one, module)
    grown = collection("adam", 128, max_capacity=4096)
    train(grown, 1, 0, size=21)
    grown.dump(tmp_path / "small")
    train(grown, 8, 1)  # every slot changes
    grown.dump(tmp_path / "delta", since=tmp_path / "small")
    other = collection("adam", 128, max_capacity=4096)
    other.load([tmp_path / "small", tmp_path / "delta"])
    assert other.table("user").capacity == grown.table("user").capacity > 1024
    assert_same(grown, other)


@pytest.mark.parametrize("mode", ["hybrid", "cache"])
def test_rows_of_slower_tiers_are_dumped_and_restored(tmp_path: Path, mode: str) -> None:
    def tiered(capacity: int = 256) -> rs.DynamicEmbeddingBagCollection:
        return collection("adam", capacity, tiers=[Tier("host", capacity=2048, mode=mode)], evict="lru")

    one = tiered()
    train(one, 4, 0)
    one.dump(tmp_path / "0")
    train(one, 1, 1, size=60)
    gone = torch.cat([rows.ids for rows in one.table("user").export_batches()])[::5]
    one.table("user").erase(gone)
    delta = one.dump(tmp_path / "1", since=tmp_path / "0")
    expected = everything(one)
    assert delta.rows["user"] < delta.present["user"] == len(expected["user"]["ids"])
    paths = [tmp_path / "0", tmp_path / "1"]
    other, small, flat = tiered(), tiered(128), collection("adam", 4096, evict="lru")
    train(other, 2, 9)
    for module in (other, small, flat):
        assert module.load(paths).lost == {"user": 0, "item": 0}
        for name, table in everything(module).items():
            for key, tensor in expected[name].items():
                assert torch.equal(table[key], tensor), (name, key)
    assert flat.table("user").size == len(expected["user"]["ids"])
    train(one, 2, 5)
    train(other, 2, 5)
    assert_same(one, other)


def everything(module: Any) -> dict[str, dict[str, Tensor]]:
    """Rows of all tiers in the order of ids."""
    found = {}
    for name, table in module.tables().items():
        rows = joined(list(table.export_batches()))
        rows = rows.at(rows.ids.argsort())
        found[name] = {"ids": rows.ids, "weight": rows.weight, "scores": rows.scores, **rows.states}
    return found


def test_files_are_split_and_only_those_of_a_shard_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "FILE_BYTES", 4096)
    one, other = collection(), collection()
    train(one, 6, 0)
    one.dump(tmp_path / "run")
    manifest = row_files.DUMP.manifest_of(tmp_path / "run")
    files = manifest["tables"]["user"]["pieces"][0]["files"]
    reader = row_files.FileReader(tmp_path / "run", manifest["tables"]["user"])
    assert len(files) > 10
    assert 0 < len(list(reader.opened(files, (0, 8)))) < len(files) / 4
    other.load(tmp_path / "run")
    assert_same(one, other)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"seed": 7}, "'user' has seed=7, and in .* seed=0: the rows of new ids would differ"),
        ({"absent": "zero"}, "has absent='zero', and in .* absent='initial': what ids without a row look up"),
        ({"weight_init_max": 0.5}, r"has weight_init=\[-0.03125, 0.5\], and in .* weight_init=None"),
        ({"evict": "lru"}, "has evict='lru', and in .* evict='lfu': the meaning of scores would differ"),
    ],
)
def test_a_dump_of_a_table_with_other_settings_is_refused(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    one, other = collection(), collection(**more)
    train(one, 1, 0)
    one.dump(tmp_path / "run")
    with pytest.raises(DumpError, match=words):
        other.load(tmp_path / "run")
    assert other.table("user").size == 0
    other.dump(tmp_path / "other")
    collection(**more).load(tmp_path / "other")


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view and not func._schema.is_mutable:
            self.bytes = max(self.bytes, result.nbytes)
        return result


def test_loading_rows_without_slots_needs_the_memory_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dump has the columns of a row in several files."""
    size = 1 << 14
    monkeypatch.setattr(row_files, "FILE_BYTES", size)

    def tiered(capacity: int) -> Any:
        tiers = [Tier("host", capacity=1 << 15)]
        return rs.DynamicEmbeddingBagCollection(
            [rs.DynamicEmbeddingConfig("user", 32, capacity, tiers=tiers)], EmbOptimType.ADAM, {"lr": 0.1}
        )

    shards = [rs.Shard(0, (0, 1024), columns) for columns in ((0, 16), (16, 32))]
    plan = rs.ShardingPlan({"": EmbeddingModuleShardingPlan({"user": rs.ParameterSharding("custom", shards=shards)})})
    one = rs.DistributedModelParallel(tiered(1024), plan=plan)
    ids = torch.randperm(6000, generator=torch.Generator().manual_seed(0)) * 7919
    parts = [rs.KeyedJaggedTensor(["user"], own, lengths=torch.ones(500, dtype=torch.int64)) for own in ids.split(500)]
    for batch in parts:
        one(batch).values().pow(2).sum().backward()
    one.dump(tmp_path / "run")
    other, largest = tiered(128), LargestTensor()
    assert other.table("user").total_size == 0  # allocates the tier
    with largest:
        other.load(tmp_path / "run")
    assert largest.bytes < 8 * 6000 + 3 * size  # the ids, of 384 bytes a row
    one.eval(), other.eval()
    for batch in parts:
        assert torch.equal(one(batch).values(), other(batch).values())
    assert other.table("user").total_size == 6000


def test_optimizer_states_can_be_left_out(tmp_path: Path) -> None:
    one, other = collection("adam"), collection("sgd")
    train(one, 3, 0)
    one.dump(tmp_path / "run")
    other.load(tmp_path / "run")
    assert torch.equal(content(one)["user.weight"], content(other)["user.weight"])
    again = collection("adam")
    train(again, 2, 1)
    again.load(tmp_path / "run", optimizer_state=False)
    assert content(again)["user.momentum1"].abs().sum() == 0
    other.dump(tmp_path / "sgd")
    with pytest.raises(DumpError, match=r"optimizer states .* Fix: optimizer_state=False"):
        again.load(tmp_path / "sgd")


def test_what_does_not_fit_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    one = collection()
    train(one, 2, 0)
    one.dump(tmp_path / "0")
    train(one, 1, 1)
    one.dump(tmp_path / "1", since=tmp_path / "0")
    other, before = collection(), content(collection())
    narrow = rs.DynamicEmbeddingBagCollection([rs.DynamicEmbeddingConfig("user", 4, 1024)], EmbOptimType.ADAM)
    unknown = rs.DynamicEmbeddingBagCollection([rs.DynamicEmbeddingConfig("shop", 4, 1024)], EmbOptimType.ADAM)
    for module, path, words in (
        (other, "1", "the table is at step 0. Fix: load the dump before it first"),
        (narrow, "0", "has 4 columns of float32, and in .* 8 of float32"),
        (unknown, "0", r"has the tables \['item', 'user'\], and no 'shop'"),
        (other, "none", "no dump at .* Fix: pass a folder that dump"),
        (collection(admit=2), "0", "has no counts of absent ids"),
    ):
        with pytest.raises(DumpError, match=words):
            module.load(tmp_path / path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in content(other).items())
    file = next((tmp_path / "0").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DumpError, match="truncated"):
        other.load(tmp_path / "0")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text").write_text("x")
    with pytest.raises(DumpError, match="is not a dump and is not replaced"):
        one.dump(tmp_path / "mine")


KILLED = """
    import os, shutil, signal, sys
    from recshard_lab import complete_folders
    from recshard_lab.embedding.dynamic import row_files
    from recshard_lab.embedding.dynamic.row_files import FileWriter
    from tests.embedding.dynamic.test_dumps import POINTS, collection, train
    row_files.FILE_BYTES = 1 << 15
    one, folder = collection(), sys.argv[1]
    train(one, 4, 0)
    for where, number in POINTS:
        one.dump(f"{folder}/{where}{number}")
    train(one, 4, 1)
    places = {
        "file": (FileWriter, "write"), "sync": (os, "fsync"), "rename": (os, "rename"),
        "checksums": (complete_folders, "_sha256"), "remove": (shutil, "rmtree"),
    }
    for where, number in POINTS:
        child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            continue
        home, name = places[where]
        original, calls = getattr(home, name), []
        def deadly(*args, **kwargs):
            calls.append(1)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)
        setattr(home, name, deadly)
        one.dump(f"{folder}/{where}{number}")
        os._exit(0)
"""
POINTS = [("file", 1), ("file", 4), ("sync", 3), ("checksums", 1), ("rename", 1), ("rename", 2), ("remove", 2)]


def test_a_writer_that_is_killed_leaves_the_dump_before_or_the_new_one_whole(tmp_path: Path) -> None:
    expected = []
    one = collection()
    for seed in (0, 1):
        train(one, 4, seed)
        expected.append(content(one))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(POINTS), done.stderr
    for where, number in POINTS:
        other = collection()
        other.load(tmp_path / f"{where}{number}")
        found = content(other)
        new = where == "remove"
        assert all(torch.equal(found[name], tensor) for name, tensor in expected[new].items()), (where, number)
        one.dump(tmp_path / f"{where}{number}")  # removes what the killed writer left
    assert {path.name for path in tmp_path.iterdir()} == {f"{where}{number}" for where, number in POINTS}
