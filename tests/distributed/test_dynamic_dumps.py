"""Dumps of sharded tables: written by some ranks, loaded by others, equal to those of the unsharded collection."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recshard_lab import DistributedModelParallel, DynamicEmbeddingBagCollection, KeyedJaggedTensor
from recshard_lab.embedding.dynamic.row_files import FileWriter
from tests.distributed import test_dynamic as base
from tests.distributed.cached_jobs import world
from tests.distributed.failure_jobs import FAULT, failing
from tests.distributed.jobs import attempted
from tests.distributed.test_checkpoint_worlds import deadly
from tests.distributed.test_delta_tracker import DYNAMIC, managed
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


def restored(folder: str, many: int) -> None:
    """Continues from dumps beside an unsharded collection that was trained on the same batches."""
    rank, _ = world()
    for optimizer, more in MORE.items():
        module, reference = (base.collection("pooled", optimizer, **more) for _ in range(2))
        for seed, count in ((0, 6), (1, 2)):
            for parts in base.batches(count, many, seed):
                reference(base.batch_of(parts, range(many))).values().pow(2).sum().backward()
        for table in reference.tables().values():
            table.erase_if(lambda ids, scores: ids % 11 == 0)
        dmp = DistributedModelParallel(module, plan=base.plan_of(module, SCHEMES[optimizer][1]))
        where = f"{folder}/{optimizer}"
        done = dmp.load([f"{where}/0", f"{where}/1"])
        assert set(done.lost.values()) == {0}
        if rank == 0:
            same_unsharded([f"{where}/0", f"{where}/1"], base.collection("pooled", optimizer, **more), reference)
        base.compared(reference, dmp, 3, 5)


def same_unsharded(where: list[Path | str], alone: Any, reference: Any) -> None:
    """The unsharded collection loads what ranks have written."""
    alone.load(where)
    found, expected = content(alone), content(reference)
    assert list(found) == list(expected)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.gate
def test_a_dump_and_its_delta_load_at_another_number_of_ranks_and_another_split(four: Any, tmp_path: Path) -> None:
    """From four ranks into one process, and the other way."""
    (rows, *others) = four.run(dumped, str(tmp_path / "four"))
    assert all(other == rows for other in others)
    assert all(0 < of_table["user"] < 500 for of_table in rows)
    dumped(str(tmp_path / "one"))
    restored(str(tmp_path / "four"), 4)
    four.run(restored, str(tmp_path / "one"), 1)


def interrupted(folder: str) -> list[str]:
    """A disk that fills on one rank."""
    dmp, _ = trained("adam", "row_wise")
    dmp.dump(f"{folder}/run")
    full = partial(OSError, 28)
    with failing(FileWriter, "write", 1, 1, full):
        errors = [attempted(lambda: dmp.dump(f"{folder}/run"))]
    dmp.load(f"{folder}/run")
    return [*errors, attempted(lambda: dmp.load(f"{folder}/none"))]


def test_an_error_of_one_rank_is_raised_on_all_and_the_dump_before_stays(two: Any, tmp_path: Path) -> None:
    for full, missing in two.run(interrupted, str(tmp_path)):
        assert FAULT in full
        assert "no dump at" in missing
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


MOMENTS: dict[str, tuple[Any, str, int]] = {
    "first file": (FileWriter, "write", 1),
    "before a file is safe": (os, "fsync", 1),
    "second rename": (os, "rename", 2),
}


def _dump_twice(rank: int, folder: Path, victims: tuple[int, ...], moment: str) -> None:
    """Dumps, trains on and dumps over it; victims die in the second dump."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    dmp, reference = trained("adam", "row_wise")
    dmp.dump(folder / "dump")
    base.compared(reference, dmp, 2, 1)
    if rank in victims:
        home, name, last = MOMENTS[moment]
        setattr(home, name, deadly(last)(getattr(home, name)))
    dmp.dump(folder / "dump")


@pytest.mark.gate
@pytest.mark.parametrize(
    ("victims", "moment"), [((0,), "second rename"), ((1,), "before a file is safe"), ((0, 1), "first file")]
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
    same_unsharded([tmp_path / "dump"], alone, reference)
    alone.dump(tmp_path / "dump")  # removes what the killed ranks left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dump", "store"]


def test_managed_tables_beside_dynamic_ones_are_in_no_dump(tmp_path: Path) -> None:
    users = DynamicEmbeddingBagCollection([DYNAMIC], torch.optim.SGD)
    dmp = DistributedModelParallel(torch.nn.ModuleDict({"managed": managed(), "users": users}))
    batch = KeyedJaggedTensor(["f"], torch.tensor([10**15]), lengths=torch.tensor([1]))
    dmp.module["users"](batch).values().sum().backward()  # type: ignore[index]
    assert dmp.dump(tmp_path / "0").rows == dmp.load(tmp_path / "0").rows == {"d": 1}
