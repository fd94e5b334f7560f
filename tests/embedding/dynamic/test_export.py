"""Exports of dynamic tables for serving: they look up what the dynamic collection looks up in evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import recshard_lab as rs
from recshard_lab.embedding import Tier, VocabularyEmbeddingBagCollection, VocabularyEmbeddingCollection, export_static
from recshard_lab.embedding.dynamic.row_files import DumpError

SAMPLES = 30


def tables(**more: Any) -> list[rs.DynamicEmbeddingConfig]:
    """Two tables that read three features, one of them in both tables."""
    return [
        rs.DynamicEmbeddingConfig("user", 8, 512, feature_names=["u", "v"], seed=3, **more),
        rs.DynamicEmbeddingConfig(
            "item", 4, 512, feature_names=["w", "u"], pooling=rs.PoolingType.MEAN, data_type=rs.DataType.FP16, **more
        ),
    ]


def collection(kind: str, **more: Any) -> Any:
    if kind == "sequence":
        return rs.DynamicEmbeddingCollection(tables(**more), torch.optim.Adagrad, {"lr": 0.5}, need_indices=True)
    return rs.DynamicEmbeddingBagCollection(tables(**more), torch.optim.Adagrad, {"lr": 0.5}, kind == "weighted")


def batch(seed: int) -> rs.KeyedJaggedTensor:
    """Bags of 0 to 4 ids, in order of features that no table has. About half of the ids recur in other batches."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (3 * SAMPLES,), generator=rng)
    ids = (torch.randn(int(lengths.sum()), generator=rng) * 60).long() * 10**15
    return rs.KeyedJaggedTensor(["w", "v", "u"], ids, torch.rand(len(ids), generator=rng), lengths)


def outputs(module: Any, features: rs.KeyedJaggedTensor) -> dict[str, Tensor]:
    """Of each key, rows; of sequences also ids and lengths."""
    found = module(features)
    if not isinstance(found, dict):
        return {key: found[key] for key in found.keys()}  # noqa: SIM118
    jagged = {f"{key} {part}": getattr(own, part)() for key, own in found.items() for part in ("values", "lengths")}
    return jagged | {f"{key} ids": own.weights() for key, own in found.items()}


def trained(dynamic: Any, seeds: range) -> Any:
    dynamic.train()
    for seed in seeds:
        rows = [rows for key, rows in outputs(dynamic, batch(seed)).items() if rows.requires_grad]
        sum(part.pow(2).sum() for part in rows).backward()  # type: ignore[union-attr]
    return dynamic.eval()


def same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=tolerance, atol=tolerance)


def absent_share(serving: Any, features: rs.KeyedJaggedTensor) -> float:
    return float((~torch.isin(features["u"].values(), serving.vocabulary("user"))).float().mean())


@pytest.mark.parametrize("absent", ["zero", "initial"])
@pytest.mark.parametrize("kind", ["pooled", "weighted", "sequence"])
def test_an_export_looks_up_what_the_dynamic_collection_does(kind: str, absent: str, tmp_path: Path) -> None:
    dynamic = trained(collection(kind, absent=absent), range(4))
    serving = export_static(dynamic)
    features = batch(99)
    assert 0.1 < absent_share(serving, features) < 0.9
    expected = outputs(dynamic, features)
    same(outputs(serving, features), expected)
    torch.save(serving.state_dict(), tmp_path / "serving.pt")
    trained(dynamic, range(4, 6))
    same(outputs(serving, features), expected)  # it is a copy
    state = torch.load(tmp_path / "serving.pt", weights_only=True)
    which = VocabularyEmbeddingCollection if kind == "sequence" else VocabularyEmbeddingBagCollection
    more = {"need_indices": True} if kind == "sequence" else {"is_weighted": kind == "weighted"}
    other = which(tables(absent=absent), **more)
    assert other.load_state_dict(state).missing_keys == []
    same(outputs(other, features), expected)
    assert not any(parameter.requires_grad for parameter in [*other.parameters(), *serving.parameters()])


def test_rows_of_all_tiers_are_exported(tmp_path: Path) -> None:
    tiers = [Tier("host", capacity=256), Tier("disk", path=tmp_path / "rows", mode="cache")]
    users = rs.DynamicEmbeddingConfig("user", 4, 128, absent="zero", tiers=tiers)
    dynamic = rs.DynamicEmbeddingBagCollection([users], torch.optim.SGD, {"lr": 0.5})
    ids = torch.arange(900) * 7 - 100
    for part in ids.split(100):
        dynamic(
            rs.KeyedJaggedTensor(["user"], part, lengths=torch.ones(100, dtype=torch.int64))
        ).values().sum().backward()
    table = dynamic.table("user")
    assert table.size <= 128
    assert table.total_size == 900
    serving = export_static(dynamic)
    assert torch.equal(serving.vocabulary("user"), ids)
    same(outputs(serving, whole := single(ids)), outputs(dynamic.eval(), whole))
    dynamic.dump(tmp_path / "dump")
    from_dump = export_static(dynamic, tmp_path / "dump")
    same(dict(from_dump.state_dict()), dict(serving.state_dict()), 0)


def single(ids: Tensor) -> rs.KeyedJaggedTensor:
    return rs.KeyedJaggedTensor(["user"], ids, lengths=torch.ones(len(ids), dtype=torch.int64))


def test_a_dump_and_its_deltas_are_exported(tmp_path: Path) -> None:
    dynamic = trained(collection("pooled"), range(3))
    dynamic.dump(tmp_path / "full")
    erased = dynamic.table("user").erase_if(lambda ids, scores: ids % 3 == 0)
    trained(dynamic, range(3, 4))
    delta = dynamic.dump(tmp_path / "delta", since=tmp_path / "full")
    assert erased
    assert 0 < delta.rows["user"] < delta.present["user"]
    alone = VocabularyEmbeddingBagCollection(tables())  # what a serving process has
    folders = [tmp_path / "full", tmp_path / "delta"]
    same(dict(export_static(alone, folders).state_dict()), dict(export_static(dynamic).state_dict()), 0)
    for wrong in ([tmp_path / "delta"], folders[::-1]):
        with pytest.raises(DumpError, match="load the dump before it first"):
            export_static(alone, wrong)
    with pytest.raises(DumpError, match="names no dump"):
        export_static(alone, [])


def test_a_delta_on_the_dump_of_another_run_is_refused(tmp_path: Path) -> None:
    one, other = trained(collection("pooled"), range(2)), trained(collection("pooled"), range(5, 7))
    one.dump(tmp_path / "full")
    other.dump(tmp_path / "other")
    trained(other, range(7, 8))
    other.dump(tmp_path / "delta", since=tmp_path / "other")
    with pytest.raises(DumpError, match="that no earlier dump has"):
        export_static(one, [tmp_path / "full", tmp_path / "delta"])


def test_a_variable_batch_looks_up_the_bags_of_its_samples() -> None:
    dynamic = trained(collection("weighted"), range(2))
    serving = export_static(dynamic)
    full, counts = batch(99), [40, 39, 11]  # of the bags of the full batch
    features = rs.KeyedJaggedTensor(
        full.keys(),
        full.values(),
        full.weights(),
        full.lengths(),
        stride_per_key_per_rank=[[count] for count in counts],
        inverse_indices=(full.keys(), torch.stack([torch.randint(0, count, (40,)) for count in counts])),
    )
    assert 0 < absent_share(serving, features) < 1
    same(outputs(serving, features), outputs(dynamic, features))


def test_a_table_without_ids_and_a_batch_without_ids() -> None:
    dynamic = collection("pooled").eval()
    same(outputs(export_static(dynamic), batch(1)), outputs(dynamic, batch(1)))
    serving = export_static(trained(dynamic, range(1)))
    none = rs.KeyedJaggedTensor(
        ["u", "v", "w"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(6, dtype=torch.int64)
    )
    assert not serving(none).values().any()


def test_wrong_collections_and_states_are_refused() -> None:
    static = rs.EmbeddingBagCollection([rs.EmbeddingBagConfig(4, 4, "t", feature_names=["f"])])
    for wrong, why in (
        (static, "'t' is not dynamic"),
        (torch.nn.Linear(2, 2), "is not a collection of dynamic tables"),
        (VocabularyEmbeddingBagCollection(tables()), "pass its folder as path="),
    ):
        with pytest.raises(ValueError, match=why):
            export_static(wrong)
    serving = export_static(trained(collection("pooled"), range(1)))
    state = serving.state_dict()
    state["vocabularies.user"] = state["vocabularies.user"].flip(0)
    with pytest.raises(RuntimeError, match=r"'user' is not int64 .M. in ascending order"):
        serving.load_state_dict(state)
    with pytest.raises(ValueError, match="'none' does not exist"):
        serving.vocabulary("none")
