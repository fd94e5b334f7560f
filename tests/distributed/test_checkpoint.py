"""Checkpoints: any plan to any other, exact; whole or not there; nothing in them is run."""

import io
import itertools
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemFormat

from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, FusedEmbeddingBagCollection
from recshard_lab.complete_folders import MANIFEST
from recshard_lab.distributed.state.checkpoint import load_checkpoint, save_checkpoint
from recshard_lab.embedding import EmbOptimType
from recshard_lab.saved.files import CHECKPOINT, CheckpointError
from recshard_lab.saved.reader import _MetadataUnpickler, packed
from tests.distributed import state_jobs
from tests.distributed.jobs import Model
from tests.distributed.test_reshard import case_of, plan_named, two_plans
from tests.forged import Payload, forged, malice, resign
from tests.grid import examples


def every_bit(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert state_jobs.same(one, other) == []


@pytest.mark.parametrize(
    ("optimizer", "saved", "loaded"),
    [("exact_row_wise_adagrad", "row_wise", "column_wise"), ("adam", "pinwheel", "data_parallel")],
)
def test_any_plan_loads_under_any_other_with_all_optimizer_states(
    two: Any, tmp_path: Path, optimizer: str, saved: str, loaded: str
) -> None:
    path, again = str(tmp_path / "run"), str(tmp_path / "again")
    case = case_of(2, optimizer, steps=3)
    case.plan = plan_named(saved, 2)
    truth, dense = two.run(state_jobs.train_and_save, case, path)[0]
    other = case_of(2, optimizer, steps=0)
    other.plan, other.seed = plan_named(loaded, 2), 5
    for state, other_dense, extra, rate in two.run(state_jobs.load_and_tell, other, path, again):
        every_bit(state, truth)
        assert all(torch.equal(a, b) for a, b in zip(other_dense, dense, strict=True))
        assert extra["epoch"] == 3
        assert extra["rng"].tolist() == [0, 1, 2]
        assert rate == 0.01
    every_bit(two.run(state_jobs.load_and_tell, case, again, None)[0][0], truth)


@settings(max_examples=examples(6, 30), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_tiling_loads_under_any_other(ranks: Any, tmp_path: Path, data: st.DataObject) -> None:
    case, plan = data.draw(two_plans(ranks.world_size))
    case.steps = []
    truth, _ = ranks.run(state_jobs.train_and_save, case, str(tmp_path / "run"))[0]
    other = replace(case, plan=plan, seed=case.seed + 1)
    for state, *_ in ranks.run(state_jobs.load_and_tell, other, str(tmp_path / "run"), None):
        every_bit(state, truth)


@pytest.mark.parametrize("optimizer", ["exact_row_wise_adagrad", "adam"])
def test_the_unsharded_modules_load_a_checkpoint_and_give_it_back(two: Any, tmp_path: Path, optimizer: str) -> None:
    case = case_of(2, optimizer, "column_wise", steps=3)
    truth, _ = two.run(state_jobs.train_and_save, case, str(tmp_path / "run"))[0]
    plain = Model(case)
    assert load_checkpoint(tmp_path / "run", plain).left  # states that a plain module has no place for
    assert all(torch.equal(value, truth[name]) for name, value in plain.state_dict().items())

    fused = Model(case)
    tables = [EmbeddingBagConfig(**table) for table in case.tables]
    fused.collection = FusedEmbeddingBagCollection(tables, EmbOptimType(optimizer), {"lr": 0.05, "eps": 1e-3})
    dense = torch.optim.Adam(fused.dense.parameters(), lr=0.3)
    loaded = load_checkpoint(tmp_path / "run", fused, dense)
    assert not loaded.left
    save_checkpoint(tmp_path / "from_fused", fused, dense, extra=loaded.extra)
    back = case_of(2, optimizer, "row_wise", steps=0, seed=7)
    for state, *_ in two.run(state_jobs.load_and_tell, back, str(tmp_path / "from_fused"), None):
        every_bit(state, truth)


def test_tables_on_the_dense_kernel_go_on_as_if_never_saved(two: Any, tmp_path: Path) -> None:
    case = case_of(2, "exact_sgd", steps=6)
    case.plan = plan_named("row_wise", 2, "dense")
    plan = plan_named("table_wise", 2, "dense")
    for loaded, went_on in two.run(state_jobs.dense_table_round_trip, case, plan, str(tmp_path / "run")):
        assert loaded == pytest.approx(went_on, abs=1e-6)


# ---- one process, one table ----


def small(seed: int = 0, rows: int = 50, name: str = "t") -> FusedEmbeddingBagCollection:
    torch.manual_seed(seed)
    table = EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=["f"])
    return FusedEmbeddingBagCollection([table], torch.optim.Adagrad, {"lr": 0.1}, backend="native")


def weights(module: Any) -> torch.Tensor:
    return module.embedding_bags["t"].weight.detach().clone()


@pytest.mark.gate
def test_a_process_killed_anywhere_in_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Children forked at every fsync, rename and rmdir of a save, and killed there."""
    first, second = weights(small(1)), weights(small(2))
    killed, calls = 0, 1
    while True:
        path = tmp_path / str(calls) / "run"
        pid = os.fork()
        if pid == 0:
            os._exit(_save_twice(path, calls))
        _, status = os.waitpid(pid, 0)
        module = small(0)
        load_checkpoint(path, module)
        found = weights(module)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            assert torch.equal(found, second)
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert torch.equal(found, first) or torch.equal(found, second)
        save_checkpoint(path, small(3))  # and the next save goes through and leaves nothing beside it
        assert [child.name for child in path.parent.iterdir()] == ["run"]
        killed, calls = killed + 1, calls + 1
    assert killed >= 6


def deadly(last: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes calls of which the ``last``-th kills the process instead."""
    calls = itertools.count(1)

    def killing(call: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return act

    return killing


def _save_twice(path: Path, last: int) -> int:
    try:
        save_checkpoint(path, small(1))
        killing = deadly(last)
        os.fsync, os.rename, os.rmdir = killing(os.fsync), killing(os.rename), killing(os.rmdir)
        save_checkpoint(path, small(2))
    except BaseException:
        return 1
    return 0


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "manifest", "metadata"])
def test_a_damaged_file_is_named_and_nothing_changes(tmp_path: Path, damage: str) -> None:
    save_checkpoint(tmp_path / "run", small(1))
    data = next((tmp_path / "run").glob("*.distcp"))
    victim = {"manifest": tmp_path / "run" / MANIFEST, "metadata": tmp_path / "run" / ".metadata"}.get(damage, data)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 4
    if damage == "truncated":
        del content[-100:]
    victim.write_bytes(content)
    if damage == "missing":
        victim.unlink()
    module = small(0)
    before = weights(module)
    with pytest.raises(CheckpointError, match=victim.name.replace(".", r"\.")):
        load_checkpoint(tmp_path / "run", module)
    assert torch.equal(weights(module), before)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (small(rows=60), r"t\.weight is 60 x 8 float32 in the model and 50 x 8 float32 in the checkpoint"),
        (small(name="u"), r"u\.weight is not in the checkpoint.*t\.weight is in the checkpoint and not in the model"),
        (small().embedding_bags, "is not in the checkpoint"),
    ],
    ids=["rows", "name", "path"],
)
def test_another_models_checkpoint_is_refused_by_name(tmp_path: Path, other: Any, named: str) -> None:
    save_checkpoint(tmp_path / "run", small())
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=named):
        load_checkpoint(tmp_path / "run", other)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


def test_a_checkpoint_without_the_states_a_fused_model_needs_is_refused_unless_weights_alone_are_asked(
    tmp_path: Path,
) -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=50, embedding_dim=8, feature_names=["f"])
    plain = EmbeddingBagCollection([table])
    save_checkpoint(tmp_path / "run", plain)
    module = small()
    with pytest.raises(CheckpointError, match=r"t\.momentum1 is not in the checkpoint.*optimizer_state=False"):
        load_checkpoint(tmp_path / "run", module)
    load_checkpoint(tmp_path / "run", module, optimizer_state=False)
    assert torch.equal(weights(module), weights(plain))


@pytest.mark.parametrize("version", [CHECKPOINT.version + 1, True, None])
def test_a_checkpoint_of_another_format_version_is_refused_by_number(tmp_path: Path, version: Any) -> None:
    save_checkpoint(tmp_path / "run", small())
    resign(tmp_path / "run", lambda manifest: {"version": version})
    with pytest.raises(
        CheckpointError, match=rf"format version {version}, but this recshard_lab reads version {CHECKPOINT.version}"
    ):
        load_checkpoint(tmp_path / "run", small())


def forged_metadata(folder: Path, value: Any) -> Path:
    save_checkpoint(folder / "run", small())
    return forged(folder / "run", folder / "evil", {".metadata": pickle.dumps(value)}, CHECKPOINT)


def test_metadata_that_names_code_is_refused_unrun(tmp_path: Path) -> None:
    evil = forged_metadata(tmp_path, malice(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match=r"\.metadata names posix\.mkdir"):
        load_checkpoint(evil, small())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("of", [(torch.Size, "numel"), (MemFormat, "__reduce__"), (MemFormat, "mro")])
def test_metadata_may_get_members_of_its_enumerations_and_no_other_attribute(tmp_path: Path, of: Any) -> None:
    with pytest.raises(CheckpointError, match="not part of a checkpoint's metadata"):
        load_checkpoint(forged_metadata(tmp_path, Payload(getattr, *of)), small())


def test_metadata_written_by_an_older_python_is_read(tmp_path: Path) -> None:
    """Before 3.11.4, Python pickles a member of an enumeration by getattr."""
    member = MemFormat.TORCH_CONTIGUOUS_FORMAT
    assert _MetadataUnpickler(io.BytesIO(pickle.dumps(Payload(getattr, MemFormat, member.name)))).load() is member


def test_extra_that_only_code_could_read_back_is_refused_when_saving(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="extra contains values that are not plain data"):
        save_checkpoint(tmp_path / "run", small(), extra=malice(tmp_path / "ran"))
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "ran").exists()
    assert packed({"a": [1, "b"], "c": torch.zeros(2)}, "extra").dtype == torch.uint8


def test_an_optimizer_over_other_parameters_and_a_folder_that_is_no_checkpoint_are_refused(tmp_path: Path) -> None:
    stranger = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match=r"shape \[3\] that does not belong to the model"):
        save_checkpoint(tmp_path / "run", small(), stranger)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="is not a checkpoint and is not replaced"):
        save_checkpoint(tmp_path / "run", small())
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_checkpoint(tmp_path / "nowhere", small())


_FULL = """
import resource, sys
from pathlib import Path
from tests.distributed.test_checkpoint import small, save_checkpoint, load_checkpoint, weights
path = Path(sys.argv[1])
save_checkpoint(path, small(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
try:
    save_checkpoint(path, small(2, rows=5000))
except OSError as error:
    print(error)
module = small(0)
load_checkpoint(path, module)
assert weights(module).equal(weights(small(1)))
print(sorted(child.name for child in path.parent.iterdir()))
"""


@pytest.mark.gate
def test_a_disk_that_fills_in_mid_save_is_named_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _FULL, str(tmp_path / "run")]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    assert "could not be saved: the disk is full" in said
    assert "A previous checkpoint there is complete" in said
    assert said.splitlines()[-1] == "['run']"


def test_a_disk_too_small_is_named_before_anything_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(OSError, match=r"full \(\[Errno 28\] the checkpoint needs [\d,]+ bytes, 1,000 are free"):
        save_checkpoint(tmp_path / "run", small())
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_torchs_own_format(tmp_path: Path) -> None:
    """torch's converter reads the tables without us."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    module = small(4)
    save_checkpoint(tmp_path / "run", module)
    dcp_to_torch_save(tmp_path / "run", tmp_path / "one.pt")
    found = torch.load(io.BytesIO((tmp_path / "one.pt").read_bytes()), weights_only=True)
    assert torch.equal(found["model"]["embedding_bags.t.weight"], weights(module))
