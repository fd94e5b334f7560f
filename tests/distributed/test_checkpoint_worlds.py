"""Checkpoints between worlds of any two sizes, ranks killed while they save, files that an attacker wrote."""

import io
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab import (
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
)
from recshard_lab.distributed.state.checkpoint import load_checkpoint, save_checkpoint
from recshard_lab.embedding import EmbOptimType
from recshard_lab.saved.files import CHECKPOINT, CheckpointError
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases, state_jobs
from tests.distributed.jobs import Case
from tests.distributed.test_checkpoint import deadly
from tests.forged import forged, malice

pytestmark = pytest.mark.gate

SIZES = range(1, 5)


def test_every_number_of_ranks_scheme_and_optimizer_loads_what_any_other_saved(four: Any, tmp_path: Path) -> None:
    """All pairs of world sizes; every scheme saves and loads, every optimizer's states go along, FP32 and FP16."""
    optimizers, schemes = list(EmbOptimType), scheme_names()
    drawn: dict[tuple[int, int], tuple[Case, Case]] = {}
    seen = set()
    for number, (m, n) in enumerate((m, n) for m in SIZES for n in SIZES):
        kind = optimizers[number % len(optimizers)]
        half = number % 4 == 3
        tables = [table | ({"data_type": DataType.FP16} if half else {}) for table in cases.TABLES]
        pair = [schemes[number % len(schemes)], schemes[(3 * number + 1) % len(schemes)]]
        seen |= {("saves", pair[0]), ("loads", pair[1]), ("steps", kind)}
        made = [
            Case(tables, cases.plan_of(tables, [name], w).to_json(), [], kind.value, backend="native", seed=seed)
            for name, w, seed in ((pair[0], m, 1), (pair[1], n, 2))
        ]
        drawn[m, n] = (made[0], made[1])
    assert len(seen) == 2 * len(schemes) + len(optimizers)
    for wrong in four.run(state_jobs.between_worlds, drawn, str(tmp_path)):
        assert not wrong


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_saving_and_loading_hold_some_blocks_and_no_table(tmp_path: Path) -> None:
    names = [f"t{number}" for number in range(4)]
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=200_000, embedding_dim=64, feature_names=[name]) for name in names
    ]
    fused = recshard_lab.FusedEmbeddingBagCollection(tables, EmbOptimType.EXACT_ADAGRAD, {"lr": 0.1}, backend="native")
    for states in fused.optimizer_states().values():
        states["momentum1"].fill_(1)  # memory comes when it is touched
    save_checkpoint(tmp_path / "run", tables_of(1))  # imports are no part of it
    load_checkpoint(tmp_path / "run", tables_of(2))
    assert state_jobs.memory_of(lambda: save_checkpoint(tmp_path / "run", fused)) < 90e6  # of 410 MB
    assert state_jobs.memory_of(lambda: load_checkpoint(tmp_path / "run", fused)) < 90e6


# ---- ranks killed while they save ----


def tables_of(value: float) -> EmbeddingBagCollection:
    table = EmbeddingBagConfig(
        name="t",
        num_embeddings=64,
        embedding_dim=8,
        feature_names=["f"],
        init_fn=lambda weight: torch.nn.init.constant_(weight, value),
    )
    return EmbeddingBagCollection([table])


def _rank(rank: int, folder: Path, victim: int, where: tuple[Any, str], last: int) -> None:
    """Saves twice; the victim dies in the second."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    save_checkpoint(folder / "run", DistributedModelParallel(tables_of(1)))
    second = DistributedModelParallel(tables_of(2))
    if rank == victim:
        module, name = where
        setattr(module, name, deadly(last)(getattr(module, name)))
    save_checkpoint(folder / "run", second)


MOMENTS = {
    "in a tensor": ((torch, "save"), 1),
    "first rename": ((os, "rename"), 2),  # torch has renamed its metadata
    "second rename": ((os, "rename"), 3),
}


@pytest.mark.parametrize(("victim", "moment"), [(1, "in a tensor"), (0, "first rename"), (0, "second rename")])
def test_a_rank_killed_while_all_save_leaves_a_whole_checkpoint(tmp_path: Path, victim: int, moment: str) -> None:
    where, last = MOMENTS[moment]
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                _rank(rank, tmp_path, victim, where, last)
            finally:
                os._exit(3)  # the survivor is told by Gloo that its peer has gone
        children.append(pid)
    ended = [os.waitpid(pid, 0)[1] for pid in children]
    assert os.WTERMSIG(ended[victim]) == signal.SIGKILL
    assert os.WEXITSTATUS(ended[1 - victim]) == 3
    module = tables_of(0)
    load_checkpoint(tmp_path / "run", module)
    assert torch.equal(module.embedding_bags["t"].weight, torch.ones(64, 8))
    save_checkpoint(tmp_path / "run", tables_of(3))  # what the killed one left is cleared away
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "store"]


# ---- files an attacker wrote ----


def test_a_tensor_that_is_code_is_refused_unrun(tmp_path: Path) -> None:
    """Manifest, checksums and metadata all agree with it."""
    save_checkpoint(tmp_path / "run", tables_of(1))
    data = bytearray((tmp_path / "run" / "__0_0.distcp").read_bytes())
    code = io.BytesIO()
    torch.save(malice(tmp_path / "ran"), code)
    metadata = pickle.loads((tmp_path / "run" / ".metadata").read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if index.fqn.endswith("t.weight"))
    assert place.length >= len(code.getvalue())
    data[place.offset : place.offset + len(code.getvalue())] = code.getvalue()
    evil = forged(tmp_path / "run", tmp_path / "evil", {"__0_0.distcp": bytes(data)}, CHECKPOINT)
    module = tables_of(5)
    with pytest.raises(CheckpointError, match="evil could not be read"):
        load_checkpoint(evil, module)
    assert not (tmp_path / "ran").exists()
    assert torch.equal(module.embedding_bags["t"].weight, torch.full((64, 8), 5.0))
