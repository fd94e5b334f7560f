"""A sharded model or a checkpoint becomes a served model: the bytes of the unsharded model, without a copy in fp32."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save

import recshard_lab as rs
from recshard_lab.distributed import sharded_collections
from recshard_lab.saved import model as saved_model
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases

TABLES = [rs.EmbeddingBagConfig(**table) for table in cases.TABLES]


class Model(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.collection: Any = rs.EmbeddingBagCollection(TABLES, device=torch.device(device))
        self.dense = nn.Sequential(nn.Linear(2, 2, device=device), nn.BatchNorm1d(2, device=device))


def differences(found: Any, expected: Any) -> list[str]:
    """Names of the state dict whose tensors are not equal."""
    one, other = found.state_dict(), expected.state_dict()
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def served_rows(plan: str, folder: str) -> tuple[list[str], list[int]]:
    """On a rank: names that differ from the quantized unsharded model, and rows of each chunk."""
    torch.manual_seed(0)
    sharded_collections._CHUNK_BYTES = 4 * 256  # several chunks a table
    whole = Model()
    expected = {kind: rs.quantize_embeddings(whole, kind) for kind in ("int8", "fp16")}
    sharded = rs.DistributedModelParallel(whole, plan=rs.ShardingPlan.from_json(plan))
    sizes = [len(rows) for table in TABLES for _, rows in sharded.collections[cases.PATH].row_chunks(table.name)]
    rs.save_checkpoint(folder, sharded)
    found = [(rs.quantize_embeddings(sharded, kind), expected[kind]) for kind in expected]
    found.append((rs.quantize_embeddings(Model("meta"), "int8", checkpoint=folder), expected["int8"]))
    found.append((rs.quantize_embeddings(sharded, "fp16", checkpoint=folder), expected["fp16"]))
    return [name for one, other in found for name in differences(one, other)], sizes


@pytest.mark.gate
def test_every_scheme_gives_the_bytes_of_the_unsharded_model(two: Any, tmp_path: Path) -> None:
    plan = cases.plan_of(cases.TABLES, list(scheme_names()), 2).to_json()
    largest = max(table.num_embeddings for table in TABLES)
    for different, sizes in two.run(served_rows, plan, str(tmp_path / "saved")):
        assert different == []
        assert max(sizes) < largest
        assert sum(sizes) == sum(table.num_embeddings for table in TABLES)


class Both(nn.Module):
    """Pooled and sequence tables, one collection at two paths, numbers and buffers of several shapes."""

    def __init__(self, device: str = "cpu", rows: int = 9) -> None:
        super().__init__()
        self.model = Model(device)
        self.same = self.model.collection
        words = rs.EmbeddingConfig(rows, 4, "words", rs.DataType.BF16, ["word"])
        self.words = rs.EmbeddingCollection([words], device=torch.device(device))
        self.scale = nn.Parameter(torch.rand((), device=device), requires_grad=False)


def as_dcp(state: dict[str, Tensor], path: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):  # that no ranks save together
        save({"app": state}, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def as_pt(state: dict[str, Tensor], path: Path) -> Path:
    torch.save({"epoch": 3, "model": {f"module.{name}": tensor for name, tensor in state.items()}}, path / "all.pt")
    return path / "all.pt"


def as_safetensors(state: dict[str, Tensor], path: Path) -> Path:
    save_file({name: tensor.clone() for name, tensor in state.items()}, path / "all.safetensors")
    return path / "all.safetensors"


@pytest.mark.parametrize("written", [as_dcp, as_pt, as_safetensors])
def test_files_of_other_libraries_are_read(
    written: Callable[[dict[str, Tensor], Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_model, "_BLOCK_BYTES", 4 * 64)  # several blocks a table
    torch.manual_seed(0)
    trained: Any = Both()
    path = written(trained.state_dict(), tmp_path)
    expected: Any = rs.quantize_embeddings(trained, "int8")
    meta: Any = Both("meta")
    found: Any = rs.quantize_embeddings(meta, "int8", checkpoint=path)
    assert differences(found, expected) == []
    assert found.same is found.model.collection
    assert not found.scale.requires_grad
    assert not found.training
    other = Both()
    assert rs.quantize_embeddings(other, "int8", inplace=True, checkpoint=path) is other
    assert differences(other, expected) == []
    of_both, of_meta = (rs.embedding.quantization_report(*pair) for pair in ((trained, expected), (trained, found)))
    assert rs.embedding.quantization_report(meta, found, checkpoint=path) == of_both == of_meta
    with pytest.raises(ValueError, match="scores need a trained model with weights"):
        rs.embedding.quantization_report(meta, found, {"size": lambda model: 0.0}, checkpoint=path)
    assert differences(rs.quantize_embeddings(meta.words, "int8", checkpoint=path), expected.words) == []


def test_a_wrong_checkpoint_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    trained = Both()
    state = trained.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    dense = {name: tensor for name, tensor in state.items() if name != "scale"}
    twice = {f"{place}.{name}": tensor for place in "ab" for name, tensor in state.items()}
    for number, (kept, rows, why) in enumerate(
        (
            ({"x": torch.ones(3)}, 9, "does not have exactly one tensor 'model.collection.embedding_bags"),
            (twice, 9, r"\(a.model.*, b.model.*\)\. Fix: pass the model that was saved"),
            (dense, 9, "scale is not in .*Fix: pass the model that was saved"),
            (state, 8, "is 9 x 4, but words.embeddings.words.weight of the model is 8 x 4"),
        )
    ):
        torch.save(kept, tmp_path / f"{number}.pt")
        model = Both(rows=rows)
        with pytest.raises(ValueError, match=why):
            rs.quantize_embeddings(model, checkpoint=tmp_path / f"{number}.pt")
        assert isinstance(model.words, rs.EmbeddingCollection)
    with pytest.raises(ValueError, match="does not exist"):
        rs.quantize_embeddings(trained, checkpoint=tmp_path / "absent")
    (as_dcp(state, tmp_path) / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ValueError, match="is truncated"):
        rs.quantize_embeddings(trained, inplace=True, checkpoint=tmp_path / "dcp")
    assert all(torch.equal(trained.state_dict()[name], tensor) for name, tensor in before.items())
    users = rs.DynamicEmbeddingConfig("user", 4, capacity=128, feature_names=["f"])
    dynamic = rs.DynamicEmbeddingBagCollection([users], torch.optim.SGD, {"lr": 0.5})
    with pytest.raises(ValueError, match=r"does not read dynamic tables\. Fix: load the checkpoint into the model"):
        rs.quantize_embeddings(dynamic, checkpoint=tmp_path / "dcp")
    hidden = nn.Sequential(Model("meta").collection)
    hidden.register_buffer("mask", torch.ones(2, device="meta"), persistent=False)
    torch.save(nn.Sequential(Model().collection).state_dict(), tmp_path / "hidden.pt")
    with pytest.raises(ValueError, match="buffer 'mask' is on the meta device and not part of a state dict"):
        rs.quantize_embeddings(hidden, checkpoint=tmp_path / "hidden.pt")


ROWS, DIM = 1 << 19, 64
