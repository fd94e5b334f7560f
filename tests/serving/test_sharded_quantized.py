"""Quantized tables over virtual devices equal the unsharded quantized model."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import recshard_lab as rl
from recshard_lab import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    ShardingPlan,
    quantize_embeddings,
    shard_for_inference,
)
from recshard_lab.embedding.kernels import KernelSpec, ShardSpec, choose_kernel
from recshard_lab.embedding.quantized.formats import pack, take_columns, unpack
from recshard_lab.serving.inference import packed
from recshard_lab.serving.inference.sources import Source
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases
from tests.serving.test_sharded_inference import BIT_EXACT, same

FORMATS = ("FP32", "FP16", "BF16", "FP8", "INT8", "INT4", "INT2")


def trained(sequence: bool = False, weighted: bool = False) -> Any:
    torch.manual_seed(0)
    if sequence:
        return EmbeddingCollection(
            [
                EmbeddingConfig(37, 16, "movies", feature_names=["seen", "liked"]),
                EmbeddingConfig(50, 16, "users", feature_names=["user"]),
            ]
        )
    mean = PoolingType.SUM if weighted else PoolingType.MEAN
    tables = [
        EmbeddingBagConfig(37, 16, "movies", feature_names=["seen", "liked"]),
        EmbeddingBagConfig(50, 32, "users", feature_names=["user"], pooling=mean),
    ]
    return EmbeddingBagCollection(tables, is_weighted=weighted)


def batch(weighted: bool = False) -> KeyedJaggedTensor:
    lengths = torch.tensor([2, 0, 1, 3, 1, 1, 0, 0, 2])
    ids = torch.tensor([1, 36, 0, 5, 6, 7, 30, 2, 49, 25])
    weights = torch.linspace(0.5, 2, 10) if weighted else None
    return KeyedJaggedTensor(["seen", "liked", "user"], ids, lengths=lengths, weights=weights)


def outputs(found: Any) -> dict[str, Tensor]:
    return {key: found[key].values() if isinstance(found, dict) else found[key] for key in found.keys()}  # noqa: SIM118


def plan(model: Any, scheme: str, world: int) -> ShardingPlan:
    pooled = isinstance(model, EmbeddingBagCollection)
    tables = model.embedding_bag_configs() if pooled else model.embedding_configs()
    return cases.plan_of([dict(vars(table)) for table in tables], [scheme], world)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("scheme", scheme_names())
def test_every_scheme_and_format(scheme: str, sequence: bool) -> None:
    model = trained(sequence)
    for kind in FORMATS:
        small = quantize_embeddings(model, kind)
        expected = outputs(small(batch()))
        for world in (1, 3):
            made = ShardingPlan({"": plan(model, scheme, world).plan["collection"]})
            for source, more in ((model, {"dtype": kind}), (small, {})):
                found = outputs(shard_for_inference(source, made, ["cpu"] * world, **more)(batch()))
                assert list(found) == list(expected)
                for key, values in expected.items():
                    same(found[key], values, exact=sequence or scheme in BIT_EXACT)


def test_formats_of_single_tables_and_weighted_batches() -> None:
    model = trained(weighted=True)
    types = {"movies": "int4", "users": "bf16"}
    small = quantize_embeddings(model, types)
    made = ShardingPlan(
        {
            "": rl.sharding.construct_module_sharding_plan(
                model, {"movies": rl.column_wise(ranks=[1, 0]), "users": rl.row_wise()}, world_size=2
            )
        }
    )
    served = shard_for_inference(model, made, ["cpu", "cpu"], dtype=types)
    same(served(batch(True)).values(), small(batch(True)).values())
    columns = 37 + 1  # and one row of zeros
    rows = 25 + 1
    assert [own.table_bytes for own in served.memory()] == [columns * (4 + 4) + rows * 64] * 2


@pytest.mark.parametrize("kind", FORMATS)
def test_columns_of_packed_rows_read_the_same_numbers(kind: str) -> None:
    data_type = rl.DataType[kind]
    rows = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    whole = pack(rows, data_type)
    for start, end in ((0, 16), (0, 8), (8, 16), (4, 12), (3, 7), (5, 9)):
        own = take_columns(whole, data_type, start, end)
        assert torch.equal(unpack(own, data_type), unpack(whole, data_type)[:, start:end])


def test_rows_are_read_and_packed_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_CHUNK_BYTES", 10 * 4 * 16)
    sizes = []

    class Watched(Source):
        def fill(self, table: str, targets: Sequence[Any]) -> None:
            for (rows, _), target in targets:
                sizes.append(len(target))
                target.copy_(torch.arange(*rows).unsqueeze(1).expand(-1, 16))

    table = EmbeddingBagConfig(37, 16, "movies", rl.DataType.FP32, ["seen"])
    target = torch.zeros(20, 8 * 4, dtype=torch.uint8)
    shard = rl.Shard(0, (12, 32), (8, 16))
    packed.fill_shards(packed.packed_rows(table, Watched()), table.data_type, [(shard, target)])
    assert sizes == [10, 10, 10, 7]
    assert torch.equal(target.view(torch.float32), torch.arange(12.0, 32).unsqueeze(1).expand(-1, 8))


def test_packed_rows_are_not_trained() -> None:
    spec = KernelSpec([ShardSpec("movies", 4, 8, rl.DataType.INT8, 8)], [0], None)
    with pytest.raises(ValueError, match="no kernel can serve this lookup"):
        choose_kernel(spec)
    kernel = choose_kernel(spec, backend="packed")(spec)
    with pytest.raises(RuntimeError, match="have no gradients"):
        kernel.backward(None, torch.zeros(1, 8))
