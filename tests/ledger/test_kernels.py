"""The library's own lookup kernels on a device: they compute what they compute on the CPU, and never wait for it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import recshard_lab as rs
from benchmarks import ledger
from recshard_lab.embedding import EmbOptimType, FusedEmbeddingCollection, OptimizerSpec
from recshard_lab.embedding.kernels import KernelInput, KernelSpec, RowNorms, ShardSpec, kernel_named
from recshard_lab.sparse import KeyedJaggedTensor, KeyedTensor
from tests.embedding.lookups import SPECS, Shape
from tests.ledger.conftest import skip_without_fbgemm
from tests.ledger.jobs import register, without_waiting

SHAPES = [
    Shape(((7, 8), (5, 8), (1, 8)), (1, 0, 2, 1), ((2, 0, 3), (1, 1, 0), (0, 0, 0), (4, 0, 1)), 0),  # one table idle
    Shape(((7, 8),), (0,), ((9, 0, 30),), 1),  # more ids than rows
    Shape(((3, 4), (6, 8), (4, 4)), (0, 1, 2), ((1, 2, 2), (5, 0, 3), (1, 0, 0)), 2),  # two widths: two groups
    Shape(((7, 8), (5, 8)), (1, 0), ((0, 0), (0, 0)), 3),  # no ids
]
MORE = [
    None,
    replace(SPECS[0], weight_decay=0.1),
    OptimizerSpec(EmbOptimType.ADAM, 0.3, eps=1e-3, max_norm=0.5, gradient_clipping=True),
]


def trained(
    shape: Shape, spec: OptimizerSpec | None, device: str, how: dict[str, Any], name: str = "native"
) -> list[torch.Tensor]:
    """Outputs, gradients of weights, tables and states of two steps."""
    norms, pooled = how.get("norms", False), how.get("pooled", True)
    types = how["data_type"]
    shards = [ShardSpec(f"t{i}", rows, d, types, 2 * d if norms else d) for i, (rows, d) in enumerate(shape.shards)]
    kernel = kernel_named(name)(KernelSpec(shards, shape.features, spec, pooled, torch.device(device)))
    torch.manual_seed(shape.seed)
    for own in kernel.weights():
        own.copy_(torch.randn(own.shape).to(own.dtype))
    counts = [sum(lengths) for lengths in shape.lengths]
    seen: list[torch.Tensor] = []
    for _ in range(2):
        ids, offsets = shape.ids().to(device), shape.offsets(pooled).to(device)
        weights = torch.rand(ids.shape).to(device) if how.get("weighted") else None
        size = (len(shape.lengths[0]), sum(shape.shards[s][1] for s in shape.features))
        flat = sum(count * shape.shards[s][1] for count, s in zip(counts, shape.features, strict=True))
        grad = torch.randn(size if pooled else (flat,)).to(device)
        with without_waiting(device):
            out, saved = kernel.forward(KernelInput(ids, offsets, weights, counts), True)
            of_weights = kernel.backward(saved, grad, doubled() if norms else None)
        seen += [own for own in (out, of_weights) if own is not None]
    if spec is None:
        seen += [own.grad for own in kernel.weights() if own.grad is not None]
    return [
        own.cpu() for own in [*seen, *kernel.weights(), *(t for s in kernel.optimizer_states() for t in s.values())]
    ]


def doubled() -> RowNorms:
    """As if the other half of each row's columns had the same squares; padding must be recognisable as such."""

    def norms(rows: list[torch.Tensor], squares: list[torch.Tensor]) -> list[torch.Tensor]:
        assert [own.shape[0] for own in rows] == [own.shape[0] for own in squares]
        return [2 * own for own in squares]

    return norms


WAYS: list[dict[str, Any]] = [
    {},
    {"weighted": True},
    {"pooled": False},
    {"weighted": True, "data_type": rs.DataType.BF16},
]


def compare(spec: OptimizerSpec | None, device: str) -> None:
    """Trains every shape in every way on the device and on the CPU."""
    register(device)
    norms = [{"norms": True}] if spec is not None and spec.row_wise else []
    for shape in SHAPES:
        for how in WAYS + norms:
            wide = {"data_type": rs.DataType.FP32, **how}
            loose = {"rtol": 2e-2, "atol": 2e-2} if "data_type" in how else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(trained(shape, spec, device, wide), trained(shape, spec, "cpu", wide), **loose)


@pytest.mark.gate
@pytest.mark.parametrize("ranks", [1], indirect=True)
@pytest.mark.parametrize("spec", [*SPECS, *MORE], ids=lambda spec: "dense" if spec is None else str(spec.optimizer))
def test_the_native_kernel_never_waits(ranks: Any, device: str, spec: OptimizerSpec | None) -> None:
    ranks.run(compare, spec, device)


def collections_waits(device: str) -> dict[str, list[str]]:
    """Where the host waits in a step of each unsharded collection."""
    register(device)
    bags = [rs.EmbeddingBagConfig(50 + i, 8, f"t{i}", feature_names=[f"f{i}"]) for i in range(3)]
    means = [replace(table, pooling=rs.PoolingType.MEAN) for table in bags]
    rows = [rs.EmbeddingConfig(50 + i, 8, f"t{i}", feature_names=[f"f{i}"]) for i in range(3)]
    fused: Any = {"device": device, "backend": "native"}
    collections = {
        "pooled": rs.EmbeddingBagCollection(bags, device=device),
        "sequence": rs.EmbeddingCollection(rows, device=device),
        "fused sums": rs.FusedEmbeddingBagCollection(bags, EmbOptimType.ADAM, {}, **fused),
        "fused means": rs.FusedEmbeddingBagCollection(means, EmbOptimType.LAMB, {}, **fused),
        "fused sequence": FusedEmbeddingCollection(rows, EmbOptimType.EXACT_ADAGRAD, {}, **fused),
    }
    found = {}
    for name, collection in collections.items():
        lengths = torch.randint(0, 4, (12,))
        ids = torch.randint(0, 50, (int(lengths.sum()),))
        batch = KeyedJaggedTensor(["f0", "f1", "f2"], ids, lengths=lengths).to(device)
        with ledger.record() as counts:
            out = collection(batch)
        with without_waiting(device):
            values = [out.values()] if isinstance(out, KeyedTensor) else [own.values() for own in out.values()]
            torch.cat([own.reshape(-1) for own in values]).sum().backward()
        found[name] = [sync.where for sync in counts.syncs]
    return found


@pytest.mark.parametrize("device", ["ledger"], scope="module", indirect=True)
@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_an_unsharded_collection_reads_the_range_of_its_ids_and_nothing_else(ranks: Any, device: str) -> None:
    (found,) = ranks.run(collections_waits, device)
    assert {name: len(lines) for name, lines in found.items()} == dict.fromkeys(found, 1)


def compare_fbgemm(spec: OptimizerSpec) -> None:
    """Trains every shape with fbgemm and with the native kernel, both on the GPU."""
    for shape in SHAPES:
        for how in WAYS:
            half = {"data_type": rs.DataType.FP16} if "data_type" in how else {}  # fbgemm has no BF16 on CUDA
            wide = {"data_type": rs.DataType.FP32, **how, **half}
            loose = {"rtol": 2e-2, "atol": 2e-2} if "data_type" in how else {"rtol": 1e-4, "atol": 1e-5}
            one, other = (trained(shape, spec, "cuda", wide, name) for name in ("fbgemm", "native"))
            torch.testing.assert_close(one, other, **loose)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no NVIDIA GPU here")
@pytest.mark.parametrize("device", ["cuda"], scope="module", indirect=True)
@pytest.mark.parametrize("ranks", [1], indirect=True)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: str(spec.optimizer))
def test_fbgemms_cuda_kernels_are_the_native_kernel(ranks: Any, device: str, spec: OptimizerSpec, decay: float) -> None:
    skip_without_fbgemm()
    if decay and spec.optimizer in (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD):
        pytest.skip("fbgemm has no weight decay for this optimizer: the native kernel serves it")
    ranks.run(compare_fbgemm, replace(spec, weight_decay=decay, weight_decay_mode=None))
