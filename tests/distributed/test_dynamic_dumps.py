"""Dumps of sharded tables: written by some ranks, loaded by others, equal to those of the unsharded collection."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import recshard_lab
from recshard_lab import DistributedModelParallel, FusedEmbeddingBagCollection, KeyedJaggedTensor, complete_folders
from recshard_lab.embedding import EmbeddingBagConfig, export_static
from recshard_lab.embedding.dynamic.dumps import files
from recshard_lab.optim import RowWiseAdagrad
from tests.distributed import test_dynamic as base
from tests.embedding.dynamic.test_dumps import content

MORE: dict[str, dict[str, Any]] = {"adam": {}, "row-wise adagrad": {"admit": 2}}
SCHEMES = {"adam": ("row_wise", "column_wise"), "row-wise adagrad": ("column_wise", "row_wise")}  # at dump, at load


def trained(optimizer: str, scheme: str) -> tuple[Any, Any]:
    """A sharded and an unsharded collection after the same steps."""
    module, reference = (base.collection("pooled", optimizer, **MORE[optimizer]) for _ in range(2))
    dmp = DistributedModelParallel(module, plan=base.plan_of(module, scheme))
    base.compared(reference, dmp, 6, 0)
    return dmp, reference


def dumped(folder: str) -> list[dict[str, int]]:
    """Writes a full dump and a delta for each optimizer, of which the second one has erasures."""
    found = []
    for optimizer in MORE:
        dmp, reference = trained(optimizer, SCHEMES[optimizer][0])
        where = f"{folder}/{optimizer}"
        dmp.dump(f"{where}/0")
        base.compared(reference, dmp, 2, 1)
        for group in dmp.module.executor.lookup.groups:
            for table in group.kernel.tables:
                table.erase_if(lambda ids, scores: ids % 11 == 0)
        delta = dmp.dump(f"{where}/1", since=f"{where}/0")
        for table in reference.tables().values():
            table.erase_if(lambda ids, scores: ids % 11 == 0)
        assert delta.present == {name: table.size for name, table in reference.tables().items()}
        found.append(delta.rows)
    return found


def restored(folder: str, world: int) -> None:
    """Continues from dumps beside an unsharded collection that was trained on the same batches."""
    rank, _ = base.dmp_ranks()
    for optimizer, more in MORE.items():
        module, reference = (base.collection("pooled", optimizer, **more) for _ in range(2))
        for seed, count in ((0, 6), (1, 2)):
            for parts in base.batches(count, world, seed):
                reference(base.batch_of(parts, range(world))).values().pow(2).sum().backward()
        for table in reference.tables().values():
            table.erase_if(lambda ids, scores: ids % 11 == 0)
        dmp = DistributedModelParallel(module, plan=base.plan_of(module, SCHEMES[optimizer][1]))
        where = f"{folder}/{optimizer}"
        done = dmp.load([f"{where}/0", f"{where}/1"])
        assert set(done.lost.values()) == {0}
        if rank == 0:
            same_unsharded(where, base.collection("pooled", optimizer, **more), reference)
        base.compared(reference, dmp, 3, 5)


def same_unsharded(where: str, alone: Any, reference: Any) -> None:
    """The unsharded collection loads what ranks have written."""
    alone.load([f"{where}/0", f"{where}/1"])
    found, expected = content(alone), content(reference)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.gate
def test_a_dump_and_its_delta_load_at_another_number_of_ranks_and_another_split(tmp_path: Path) -> None:
    (rows, *others) = base.launched(3, dumped, str(tmp_path))
    assert all(other == rows for other in others)
    assert all(0 < of_table["user"] < 500 for of_table in rows)
    for world in (1, 2):
        base.launched(world, restored, str(tmp_path), 3)


def exported(folder: str) -> list[int]:
    """Exports each split's dump on every rank. Returns the ids of a table."""
    rank, world = base.dmp_ranks()
    (parts,) = base.batches(1, world, 9)
    found = []
    for scheme, kind in (("row_wise", "pooled"), ("column_wise", "sequence"), ("table_wise", "pooled")):
        module, reference = (base.collection(kind, "adam") for _ in range(2))
        dmp = DistributedModelParallel(module, plan=base.plan_of(module, scheme))
        base.compared(reference, dmp, 2, 0)
        dmp.dump(f"{folder}/{scheme}")
        serving = export_static(dmp.module, f"{folder}/{scheme}")
        for key, tensor in export_static(reference).state_dict().items():
            torch.testing.assert_close(serving.state_dict()[key], tensor, rtol=1e-9, atol=1e-9)
        mine = base.batch_of(parts, range(rank, rank + 1))
        for one, other in zip(base.rows_of(serving(mine)), base.rows_of(dmp.eval()(mine)), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-9)
        found.append(len(serving.vocabulary("user")))
    return found


def test_tables_of_ranks_are_exported_for_serving(tmp_path: Path) -> None:
    one, other = base.launched(2, exported, str(tmp_path))
    assert one == other
    assert min(one) > 100


def interrupted(folder: str) -> list[str]:
    """A disk that fills on one rank."""
    from recshard_lab.embedding.dynamic.dumps.files import FileWriter

    dmp, _ = trained("adam", "row_wise")
    dmp.dump(f"{folder}/run")
    write = FileWriter.write
    errors = []
    if base.dmp_ranks()[0] == 1:

        def full(self: Any, tensors: Any) -> str:
            if len(self.paths) == 1:
                raise OSError(28, "No space left on device")
            return write(self, tensors)

        FileWriter.write = full  # type: ignore[method-assign]
    try:
        dmp.dump(f"{folder}/run")
    except OSError as error:
        errors.append(str(error))
    finally:
        FileWriter.write = write  # type: ignore[method-assign]
    dmp.load(f"{folder}/run")
    try:
        dmp.load(f"{folder}/none")
    except ValueError as error:
        errors.append(str(error))
    return errors


def test_an_error_of_one_rank_is_raised_on_all_and_the_dump_before_stays(tmp_path: Path) -> None:
    for full, missing in base.launched(2, interrupted, str(tmp_path)):
        assert "No space left" in full
        assert "no dump at" in missing
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def static(scheme: str) -> Any:
    """A sharded collection of static tables, each time with the same weights."""
    tables = [
        EmbeddingBagConfig(name="user", num_embeddings=64, embedding_dim=8, feature_names=["u"]),
        EmbeddingBagConfig(name="item", num_embeddings=32, embedding_dim=16, feature_names=["v"]),
    ]
    torch.manual_seed(0)
    module = FusedEmbeddingBagCollection(tables, RowWiseAdagrad, {"lr": 0.1})
    return DistributedModelParallel(module, plan=_plan(module, scheme))


def _plan(module: Any, scheme: str) -> Any:
    world = base.dmp_ranks()[1]
    made = {
        "row_wise": recshard_lab.row_wise(),
        "column_wise": recshard_lab.column_wise(list(range(min(2, world)))),
        "replicated": recshard_lab.data_parallel(),
    }[scheme]
    chosen = dict.fromkeys(("user", "item"), made)
    return recshard_lab.ShardingPlan(
        {"": recshard_lab.sharding.construct_module_sharding_plan(module, chosen, world_size=world)}
    )


def replayed(folder: str) -> None:
    """Rows of static tables that one model trained, in another one under another plan."""
    rank, _ = base.dmp_ranks()
    for number, (written, read) in enumerate((("row_wise", "column_wise"), ("column_wise", "replicated"))):
        dmp, other = static(written), static(read)
        ids = torch.tensor([3, 9, 40, 5, 31, 6])
        dmp(KeyedJaggedTensor(["u", "v"], ids, lengths=torch.tensor([3, 3]))).values().pow(2).sum().backward()
        before = other.full_state_dict()
        keys = [f"embedding_bags.{name}.weight" for name in ("user", "item")]
        rows = {keys[0]: torch.tensor([3, 9, 40]), keys[1]: torch.tensor([5, 31, 6])}
        done = dmp.dump(f"{folder}/{number}", rows=rows)
        assert done.rows == {"user": 3, "item": 3}
        other.load(f"{folder}/{number}")
        found, expected = other.full_state_dict(), dmp.full_state_dict()
        for key in keys:
            assert torch.equal(found[key], expected[key])
            assert not torch.equal(found[key], before[key])
        if rank == 0 and read == "replicated":  # both have all rows of the state here
            first, second = (each.table_shards()[keys[0]].states[0]["momentum1"] for each in (dmp, other))
            assert torch.equal(first, second)
            assert first.count_nonzero() == 3


def test_rows_of_static_tables_are_replayed_under_another_plan(tmp_path: Path) -> None:
    for world in (1, 3):
        base.launched(world, replayed, str(tmp_path / str(world)))


MOMENTS: dict[str, tuple[Any, str, int]] = {
    "first file": (files.FileWriter, "write", 1),
    "a later file": (files.FileWriter, "write", 2),
    "before a file is safe": (os, "fsync", 1),
    "checksums": (complete_folders, "_sha256", 1),
    "first rename": (os, "rename", 1),
    "second rename": (os, "rename", 2),
}


def _deadly(call: Callable[..., Any], last: int) -> Callable[..., Any]:
    """The call, whose ``last``-th use kills the process."""
    uses = 0

    def act(*args: Any, **kwargs: Any) -> Any:
        nonlocal uses
        uses += 1
        if uses == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return act


def _dump_twice(rank: int, folder: Path, victims: tuple[int, ...], moment: str) -> None:
    """Dumps, trains on and dumps over it; victims die in the second dump."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    dmp, reference = trained("adam", "row_wise")
    dmp.dump(folder / "dump")
    base.compared(reference, dmp, 2, 1)
    if rank in victims:
        home, name, last = MOMENTS[moment]
        setattr(home, name, _deadly(getattr(home, name), last))
    dmp.dump(folder / "dump")


@pytest.mark.gate
@pytest.mark.parametrize(
    ("victims", "moment"),
    [
        *(((0,), moment) for moment in MOMENTS),
        ((1,), "a later file"),
        ((1,), "before a file is safe"),
        ((0, 1), "first file"),
    ],
)
def test_ranks_killed_while_all_dump_leave_the_dump_before_whole(
    tmp_path: Path, victims: tuple[int, ...], moment: str
) -> None:
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                _dump_twice(rank, tmp_path, victims, moment)
            finally:
                os._exit(3)  # the survivor is told by Gloo that its peer has gone
        children.append(pid)
    ended = [os.waitpid(pid, 0)[1] for pid in children]
    for rank, status in enumerate(ended):
        assert os.WTERMSIG(status) == signal.SIGKILL if rank in victims else os.WEXITSTATUS(status) == 3
    reference, alone = (base.collection("pooled", "adam") for _ in range(2))
    for parts in base.batches(6, 2, 0):
        reference(base.batch_of(parts, range(2))).values().pow(2).sum().backward()
    alone.load(tmp_path / "dump")
    found, expected = content(alone), content(reference)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9)
    alone.dump(tmp_path / "dump")  # removes what the killed ranks left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump", "store"]
