"""Served collections against the trained ones, their own decoded rows, and each other's kernels."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recshard_lab as rs
from recshard_lab import DataType, PoolingType
from recshard_lab.embedding import QuantConfig, QuantEmbeddingBagCollection, QuantEmbeddingCollection
from recshard_lab.embedding.kernels import fbgemm
from recshard_lab.embedding.quantized import collections, formats
from recshard_lab.embedding.quantized.formats import PackedTables
from recshard_lab.embedding.quantized.kernels import choose_rows

KINDS = [DataType.FP32, DataType.FP16, DataType.BF16, DataType.FP8, DataType.INT8, DataType.INT4, DataType.INT2]
MIXED = {"film": DataType.INT4, "genre": DataType.BF16, "word": DataType.INT8}
every_kind = pytest.mark.parametrize("kind", [*KINDS, MIXED], ids=lambda kind: getattr(kind, "value", "mixed"))
every_backend = pytest.mark.parametrize("backend", [None, "native"], ids=["chosen", "native"])
SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
FEATURES = ["genre", "liked", "seen", "word"]  # not the order of the tables


def tables(dims: tuple[int, int, int] = (8, 4, 8), poolings: Any = (SUM, MEAN, SUM)) -> list[rs.EmbeddingBagConfig]:
    return [
        rs.EmbeddingBagConfig(50, dims[0], "film", feature_names=["seen", "liked"], pooling=poolings[0]),
        rs.EmbeddingBagConfig(9, dims[1], "genre", feature_names=["genre"], pooling=poolings[1]),
        rs.EmbeddingBagConfig(70, dims[2], "word", feature_names=["word", "seen"], pooling=poolings[2]),
    ]


def rows_of(dims: tuple[int, int, int]) -> list[rs.EmbeddingConfig]:
    return [
        rs.EmbeddingConfig(t.num_embeddings, t.embedding_dim, t.name, t.data_type, t.feature_names)
        for t in tables(dims)
    ]


def batch(weights: bool = False, dtype: torch.dtype = torch.int64) -> rs.KeyedJaggedTensor:
    torch.manual_seed(3)
    lengths = torch.tensor([2, 0, 1, 0, 0, 0, 3, 1, 2, 1, 1, 4])
    ids = torch.cat([torch.randint(0, 9, (3,)), torch.randint(0, 50, (6,)), torch.randint(0, 70, (6,))]).to(dtype)
    return rs.KeyedJaggedTensor(FEATURES, ids, torch.rand(15) - 0.3 if weights else None, lengths=lengths)


def decoded(served: Any, trained: nn.Module) -> nn.Module:
    """The trained module with the rows that the served one reads."""
    name = served.tables_name
    configs = served._tables
    trained.load_state_dict({f"{name}.{t.name}.weight": served.dequantized(t.name) for t in configs})
    return trained


@every_kind
@every_backend
@pytest.mark.parametrize(
    "poolings", [(SUM, SUM, SUM), (MEAN, MEAN, MEAN), (SUM, MEAN, SUM)], ids=["sum", "mean", "both"]
)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_pooled_lookups_are_those_of_the_decoded_rows(kind: Any, backend: Any, poolings: Any, weighted: bool) -> None:
    torch.manual_seed(1)
    trained = rs.EmbeddingBagCollection(tables(poolings=poolings), is_weighted=weighted)
    served = QuantEmbeddingBagCollection.from_float(trained, dtype=kind, backend=backend)
    found, expected = served(batch(weighted)), decoded(served, trained)(batch(weighted))
    assert found.keys() == expected.keys()
    assert found.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(found.values(), expected.values().detach(), rtol=1e-5, atol=1e-6)
    assert not found.values().requires_grad


def test_a_variable_batch_is_that_of_the_decoded_rows() -> None:
    trained = rs.EmbeddingBagCollection(tables())
    served = QuantEmbeddingBagCollection.from_float(trained, dtype=torch.qint8)
    lengths, inverse = torch.tensor([1, 2, 1, 0, 1, 1]), torch.tensor([[0, 1, 0], [0, 0, 0], [1, 0, 1], [0, 0, 0]])
    one = rs.KeyedJaggedTensor(
        FEATURES,
        torch.arange(6),
        lengths=lengths,
        stride_per_key_per_rank=[[2], [1], [2], [1]],
        inverse_indices=(FEATURES, inverse),
    )
    found, expected = served(one).values(), decoded(served, trained)(one).values()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-6)


@every_kind
@every_backend
@pytest.mark.parametrize("dims", [(8, 8, 8), (8, 4, 16)], ids=["one", "mixed"])
def test_sequences_are_the_decoded_rows(kind: Any, backend: Any, dims: tuple[int, int, int]) -> None:
    torch.manual_seed(1)
    trained = rs.EmbeddingCollection(rows_of(dims), need_indices=True)
    served = QuantEmbeddingCollection.from_float(trained, dtype=kind, backend=backend)
    found, expected = served(batch()), decoded(served, trained)(batch())
    assert list(found) == list(expected)
    for name, own in found.items():
        torch.testing.assert_close(own.values(), expected[name].values().detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(own.lengths(), expected[name].lengths())
        assert torch.equal(own.weights(), expected[name].weights())


@every_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_output_dtypes(backend: Any, dtype: torch.dtype) -> None:
    trained = rs.EmbeddingBagCollection(tables())
    wide = QuantEmbeddingBagCollection.from_float(trained, backend=backend)
    narrow = QuantEmbeddingBagCollection.from_float(trained, output_dtype=dtype, backend=backend)
    assert narrow.output_dtype() is dtype
    found = narrow(batch()).values()
    assert found.dtype is dtype
    torch.testing.assert_close(found, wide(batch()).values().to(dtype), rtol=1e-2, atol=1e-3)
    rows = QuantEmbeddingCollection(rows_of((8, 8, 8)), output_dtype=dtype, backend=backend)
    assert rows(batch())["word"].values().dtype is dtype
    with pytest.raises(ValueError, match=r"output_dtype torch.float64 is not supported. Fix: use one of torch.float32"):
        QuantEmbeddingBagCollection(tables(), output_dtype=torch.float64)


@every_backend
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_no_ids_no_samples_and_int32_ids(backend: Any, dtype: torch.dtype) -> None:
    trained = rs.EmbeddingBagCollection(tables())
    served = QuantEmbeddingBagCollection.from_float(trained, backend=backend)
    torch.testing.assert_close(served(batch(dtype=dtype)).values(), served(batch()).values())
    sequence = QuantEmbeddingCollection(rows_of((8, 8, 8)), backend=backend)
    for samples in (3, 0):
        lengths = torch.zeros(4 * samples, dtype=torch.int64)
        empty = rs.KeyedJaggedTensor(FEATURES, torch.empty(0, dtype=dtype), lengths=lengths, stride=samples)
        found = served(empty).values()
        assert found.shape == (samples, 36)
        assert not found.any()
        assert sequence(empty)["word"].values().shape == (0, 8)


@every_backend
@pytest.mark.parametrize("mode", ["pooled", "sequence"])
def test_out_of_range_ids_follow_the_policy(backend: Any, mode: str) -> None:
    trained_kind: Any = rs.EmbeddingBagCollection if mode == "pooled" else rs.EmbeddingCollection
    served_kind: Any = QuantEmbeddingBagCollection if mode == "pooled" else QuantEmbeddingCollection
    configs: Any = tables(poolings=(SUM, MEAN, MEAN)) if mode == "pooled" else rows_of((8, 8, 8))

    def values(module: nn.Module, ids: list[int]) -> Tensor:
        found = module(
            rs.KeyedJaggedTensor(FEATURES, torch.tensor(ids), lengths=torch.tensor([2, 1, 1, 1, 0, 1, 1, 2]))
        )
        return found.values() if mode == "pooled" else torch.cat([own.values() for own in found.values()])

    inside, outside = [0, 1, 8, 49, 0, 3, 5, 69, 2], [9, 1, -1, 50, 60, -7, 70, 10**12, 2]
    for policy in ("clamp", "ignore", "error"):
        trained = trained_kind(configs, out_of_range=policy)
        served = served_kind.from_float(trained, dtype=DataType.FP32, backend=backend)
        for ids in (inside, outside) if policy != "error" else (inside,):
            torch.testing.assert_close(values(served, ids), values(trained, ids).detach(), rtol=1e-6, atol=1e-7)
            assert served.out_of_range_count() == trained.out_of_range_count()
        assert (served.out_of_range_count() > 0) == (policy != "error")
    wrong = [(0, -1, "genre", "genre"), (3, 50, "liked", "film"), (4, 50, "liked|seen", "film")]
    for place, id, feature, table in (*wrong, (8, 70, "word", "word"), (8, 2**40, "word", "word")):
        ids = [*inside[:place], id, *inside[place + 1 :]]
        words = rf"feature '({feature})', sample \d: id {id} is not a row of table '{table}'"
        with pytest.raises(ValueError, match=words):
            values(served, ids)


def same(one: Any, other: Any) -> None:
    assert torch.equal(one(batch()).values(), other(batch()).values())


@every_kind
def test_state_dicts_pickles_and_copies(kind: Any) -> None:
    served = QuantEmbeddingBagCollection.from_float(rs.EmbeddingBagCollection(tables()), dtype=kind)
    state = served.state_dict()
    assert list(state) == [f"embedding_bags.{t.name}.weight" for t in tables()]
    assert served.weight_bytes() == sum(own.numel() for own in state.values())
    assert not list(served.parameters())
    for assign in (False, True):
        again = QuantEmbeddingBagCollection(served.embedding_bag_configs())
        again.load_state_dict({name: own.clone() for name, own in state.items()}, assign=assign)
        same(again, served)
    file = io.BytesIO()
    torch.save(served, file)
    file.seek(0)
    pickled = pickle.dumps(served)
    assert len(pickled) < 2 * served.weight_bytes() + 20_000
    for again in (copy.deepcopy(served), pickle.loads(pickled), torch.load(file, weights_only=False)):
        same(again, served)
        before = served(batch()).values()
        again.packed("film").zero_()
        assert torch.equal(again.state_dict()["embedding_bags.film.weight"], torch.zeros_like(again.packed("film")))
        assert not again(batch())["liked"].any()
        assert torch.equal(served(batch()).values(), before)
    served.to("cpu").float().half()  # bytes stay bytes
    assert torch.equal(served(batch()).values(), before)
    with pytest.raises(RuntimeError, match="size mismatch"):
        QuantEmbeddingBagCollection(tables((8, 4, 4))).load_state_dict(state)


def test_rows_are_padded_to_16_bytes_where_kernels_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    served = QuantEmbeddingBagCollection.from_float(rs.EmbeddingBagCollection(tables()), dtype=MIXED, backend="native")
    for module in (formats, collections):
        monkeypatch.setattr(module, "row_alignment", lambda device: 16)
    padded = QuantEmbeddingBagCollection(served.embedding_bag_configs(), backend="native")
    assert padded.packed("film").stride() == (16, 1)
    assert all(place.start % 16 == place.stride % 16 == 0 for place in padded._packed.places)
    padded.load_state_dict(served.state_dict())
    same(padded, served)
    assert torch.equal(served.to("cpu").packed("film"), padded.packed("film"))
    assert served.packed("film").stride() == (16, 1)  # moved
    same(padded, served)


def test_torch_ao_quantizes_with_a_qconfig() -> None:
    observer = torch.ao.quantization.PlaceholderObserver
    trained = nn.Sequential(rs.EmbeddingBagCollection(tables()))
    config = torch.ao.quantization.QConfig(
        activation=observer.with_args(dtype=torch.float16), weight=observer.with_args(dtype=torch.quint4x2)
    )
    mapping = {rs.EmbeddingBagCollection: QuantEmbeddingBagCollection}
    with pytest.warns(DeprecationWarning, match="torch.ao"):
        served = torch.ao.quantization.quantize_dynamic(trained, {rs.EmbeddingBagCollection: config}, mapping=mapping)[
            0
        ]
    assert isinstance(served, QuantEmbeddingBagCollection)
    assert served.output_dtype() is torch.float16
    assert {table.data_type for table in served.embedding_bag_configs()} == {DataType.INT4}
    trained[0].qconfig = QuantConfig(config.activation, config.weight, {"word": torch.qint8})  # type: ignore[union-attr]
    own = QuantEmbeddingBagCollection.from_float(trained[0])
    assert [table.data_type for table in own.embedding_bag_configs()] == [DataType.INT4, DataType.INT4, DataType.INT8]


def test_plain_tensors_below_the_batch() -> None:
    served = QuantEmbeddingBagCollection.from_float(rs.EmbeddingBagCollection(tables(), is_weighted=True))
    assert served.feature_names() == ["seen", "liked", "genre", "word", "seen"]
    given = batch(True)
    ordered = given.permute([2, 1, 0, 3, 2])
    pooled = served.lookup(ordered.values(), ordered.offsets(), ordered.weights())
    assert torch.equal(pooled, served(given).values())
    rows = QuantEmbeddingCollection.from_float(rs.EmbeddingCollection(rows_of((8, 8, 8))))
    flat = rows.lookup(ordered.values(), ordered.offsets())
    assert torch.equal(flat, torch.cat([own.values() for own in rows(given).values()]))
    mixed = QuantEmbeddingCollection.from_float(rs.EmbeddingCollection(rows_of((8, 8, 8))), dtype=MIXED)
    flat = mixed.lookup(ordered.values(), ordered.offsets())
    assert torch.equal(flat, torch.cat([own.values() for own in mixed(given).values()]))
    with pytest.raises(ValueError, match="several embedding_dim"):
        QuantEmbeddingCollection(rows_of((8, 4, 8))).lookup(ordered.values(), ordered.offsets())


@pytest.mark.gate
@pytest.mark.parametrize("backend", [None, "native"])
@pytest.mark.parametrize("policy", ["error", "clamp", "ignore"])
def test_torch_export_keeps_every_number(backend: Any, policy: str) -> None:
    configs = tables()
    configs[2].feature_names = ["word"]
    trained = rs.EmbeddingBagCollection(configs, out_of_range=policy)
    served = QuantEmbeddingBagCollection.from_float(trained, dtype=MIXED, backend=backend)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.served = served

        def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
            pooled = self.served(rs.KeyedJaggedTensor(["seen", "liked", "genre", "word"], values, lengths=lengths))
            found: Tensor = pooled.values()
            return found

    def drawn(samples: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(samples)
        lengths = torch.randint(0, 4, (4 * samples,))
        return torch.randint(0, 9, (int(lengths.sum()),)), lengths

    dynamic = {"values": {0: torch.export.Dim.DYNAMIC}, "lengths": {0: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(Model(), drawn(5), dynamic_shapes=dynamic, strict=False).module()
    for samples in (5, 11, 2):
        assert torch.equal(program(*drawn(samples)), Model()(*drawn(samples)))
    values, lengths = drawn(5)
    values[0] = 10**6
    if policy == "error":
        with pytest.raises(RuntimeError):
            program(values, lengths)
    else:
        assert torch.equal(program(values, lengths), Model()(values, lengths))


def test_what_cannot_be_served_is_refused_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"backend 'tpu' is not registered. Fix: use one of 'fbgemm', 'native'"):
        QuantEmbeddingBagCollection(tables(), backend="tpu")
    bf16 = [rs.EmbeddingBagConfig(5, 8, "t", DataType.BF16, ["f"])]
    with pytest.raises(ValueError, match=r"'t' \(fbgemm: it has no kernel for BF16\). Fix: leave backend out"):
        QuantEmbeddingBagCollection(bf16, backend="fbgemm")
    with pytest.raises(ValueError, match=r"FP64.* is not a number format of served tables"):
        QuantEmbeddingBagCollection([rs.EmbeddingBagConfig(5, 8, "t", DataType.FP64, ["f"])])
    served = QuantEmbeddingBagCollection(tables((8, 4, 8)))
    with pytest.raises(ValueError, match=r"table 'films' is unknown. Fix: use one of 'film', 'genre', 'word'"):
        served.dequantized("films")
    with pytest.raises(
        ValueError, match=r"rows 49 to 51 of shape \[2, 8\] do not fit table 'film', which is \[50, 8\]"
    ):
        served.load_packed("film", torch.zeros(2, 8), 49)
    with pytest.raises(ValueError, match="no weights, and the collection has is_weighted=True"):
        QuantEmbeddingBagCollection(tables(), is_weighted=True)(batch())
    with pytest.raises(ValueError, match=r"feature 'genre' of table 'genre' is not in the batch"):
        served(rs.KeyedJaggedTensor(["seen", "liked", "word"], torch.tensor([1]), lengths=torch.tensor([1, 0, 0])))
    with pytest.raises(ValueError, match=r"ids are torch\.float32"):
        served.lookup(torch.zeros(1), torch.tensor([0, 1, 1, 1, 1, 1]))
    with pytest.raises(ValueError, match="must be an EmbeddingCollection, got EmbeddingBagCollection"):
        QuantEmbeddingCollection.from_float(rs.EmbeddingBagCollection(tables()))
    place = PackedTables(bf16, torch.device("cpu")).places[0]._replace(kind=DataType.INT8)
    on_cpu = choose_rows(place, torch.device("cpu"))
    assert on_cpu.name == "fbgemm"
    assert choose_rows(place, torch.device("xpu")).name == "native"
    monkeypatch.setattr("recshard_lab.embedding.quantized.kernels.why_absent", lambda: "not here")
    assert choose_rows(place, torch.device("cpu")).name == "native"
    monkeypatch.undo()
    cpu_build = fbgemm.why_no_cuda() is not None
    assert choose_rows(place, torch.device("cuda")).name == ("native" if cpu_build else "fbgemm")
