"""Inference at fixed shapes equals inference: every scheme, batches of any size up to the largest, and others."""

from typing import Any

import pytest
import torch

from recshard_lab import EmbeddingBagCollection, shard_for_inference
from recshard_lab.serving.inference import ShardedInference
from recshard_lab.sharding.schemes import scheme_names
from tests.serving.capture_jobs import Ranker, bags, batches, collection, served_by

MOST = 6  # ids of a sample
KEYS = batches("pooled", [1])[0].keys()


def same(one: Any, other: Any) -> None:
    """Outputs of a collection or of a model. Sums of row shards are added in the same order: every bit is equal."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert torch.equal(one[key].values(), other[key].values())
            assert torch.equal(one[key].lengths(), other[key].lengths())
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one.keys() == other.keys()
        assert torch.equal(one.values(), other.values())


@pytest.mark.parametrize("kind", ["pooled", "weighted", "sequence"])
@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("scheme", scheme_names())
def test_every_scheme(scheme: str, dtype: str | None, kind: str) -> None:
    served = served_by(collection(kind), scheme, ["cpu"] * 3, dtype)
    captured = served.capture(batches(kind, [2])[0], batch_sizes=[2, 8], ids_per_sample=MOST)
    for batch in batches(kind, [1, 2, 3, 8, 1]):
        same(captured(batch), served(batch))
    assert (captured.graph_calls, captured.eager_calls) == (5, 0)


def test_a_model_with_a_dense_part_and_int32_ids() -> None:
    model = Ranker(collection("pooled"))
    served = shard_for_inference(model, devices=["cpu", "cpu"])
    (example,) = batches("pooled", [4], torch.int32)
    captured = served.capture(torch.zeros(4, 3), example, batch_sizes=(16, 4))
    assert captured.batch_sizes == [4, 16]
    assert repr(captured) == "CapturedInference(programs without graphs of 4, 16 samples)"
    for batch in batches("pooled", [4, 3, 1], torch.int32):
        dense = torch.rand(batch.stride(), 3)
        torch.testing.assert_close(captured(dense, batch), model(dense, batch).detach())


def test_outputs_are_kept_when_the_next_batch_runs() -> None:
    served = served_by(collection("pooled"), "row_wise", ["cpu"] * 2)
    captured = served.capture(batches("pooled", [3])[0], batch_sizes=[4], ids_per_sample=MOST)
    first, second = batches("pooled", [3, 4])
    kept = captured(first)
    captured(second)
    same(kept, served(first))


def test_what_does_not_fit_runs_as_it_is_and_is_counted() -> None:
    served = served_by(collection("pooled"), "table_wise", ["cpu"] * 2)
    captured = served.capture(batches("pooled", [2])[0], batch_sizes=[4], ids_per_sample=1)
    (many,) = batches("pooled", [5])
    wide = bags([[0] * 3, [0] * 2], KEYS)
    turned = many.permute([1, 0, *range(2, len(KEYS))])
    for number, batch in enumerate([many, wide, turned], start=1):
        same(captured(batch), served(batch))
        assert (captured.graph_calls, captured.eager_calls) == (0, number)
    captured(bags([[0], [1]], KEYS))
    assert captured.graph_calls == 1


def test_ids_that_are_no_rows() -> None:
    def made(policy: str) -> tuple[ShardedInference, Any]:
        own = EmbeddingBagCollection(tables=collection("pooled").embedding_bag_configs(), out_of_range=policy)
        served = served_by(own, "row_wise", ["cpu"] * 2)
        return served, served.capture(batches("pooled", [2])[0], batch_sizes=[4], ids_per_sample=MOST)

    wrong = bags([[0], [10**6]], KEYS)
    served, captured = made("error")
    with pytest.raises(ValueError, match="1000000") as found:
        captured(wrong)
    with pytest.raises(ValueError, match="1000000") as expected:
        served(wrong)
    assert str(found.value) == str(expected.value)
    for policy in ("clamp", "ignore"):
        served, captured = made(policy)
        same(captured(wrong), served(wrong))
        assert captured.eager_calls == 1


def test_what_cannot_be_captured_is_refused() -> None:
    served = served_by(collection("pooled"), "table_wise", ["cpu"])
    (batch,) = batches("pooled", [2])

    def refused(match: str, *example: Any, model: Any = served, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            model.capture(*example, **options)

    refused(r"batch_sizes must be positive integers, got \[\]", batch, batch_sizes=[])
    refused(r"batch_sizes must be positive integers, got \[0\]", batch, batch_sizes=[0])
    refused(r"ids_per_sample of .* must be a positive number, got 0", batch, ids_per_sample=0)
    refused(r"ids_per_sample lacks feature", batch, ids_per_sample={"x": 1})
    refused(r"argument 1 of the example is a str", batch, "text")
    refused(r"Fix: pass devices= to shard_for_inference", batch, model=shard_for_inference(collection("pooled")))
