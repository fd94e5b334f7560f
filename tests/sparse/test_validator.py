"""The validator finds, in batches put together without a look, the feature and the sample that are wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given

from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, checks, validate_keyed_jagged_tensor
from tests.refusals import not_refused
from tests.sparse.jagged_batches import Batch, batches

IDS, T = torch.arange(8), torch.tensor


@given(batches())
def test_what_the_constructor_takes_is_valid(batch: Batch) -> None:
    kjt = batch.kjt()
    assert kjt.validate() is kjt
    validate_keyed_jagged_tensor(kjt.permute(list(range(len(batch.keys)))))
    for part in kjt.to_dict().values():
        assert part.validate() is part


def unchecked(lengths: list[int] | None = None, **parts: Any) -> KeyedJaggedTensor:
    if lengths is not None or "offsets" not in parts:
        parts["lengths"] = torch.tensor([2, 0, 1, 1, 1, 3] if lengths is None else lengths)
    return KeyedJaggedTensor._unchecked(**{"keys": ["movie", "genre"], "values": IDS, "stride": 3, **parts})


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: unchecked([2, 0, 1, 1, 5, -1]), "negative length -1 at feature 'genre', sample 2"),
    (lambda: unchecked([2, 0, 1, 1, 7, 0]), "feature 'genre', sample 1 would end at 11"),
    (
        lambda: unchecked([2**62, 2**62, 2**62, 2**62, 8, 0]),  # the sum wraps around
        "lengths sum to 18446744073709551624, but values has 8: feature 'movie', sample 0 would end at",
    ),
    (
        lambda: unchecked(None, offsets=T([0, 5, 2, 3, 4, 5, 8])),
        "offsets fall from 5 to 2 at feature 'movie', sample 1",
    ),
    (lambda: unchecked([2, 0, 1, 1, 1, 3], offsets=T([0, 2, 2, 4, 4, 5, 8])), "at feature 'movie', sample 2"),
    (lambda: unchecked(stride=4), "lengths describes 6 bags, expected 2 keys x stride 4"),
    (lambda: unchecked(keys=["a", "a"]), r"key 'a' is at positions \[0, 1\]"),
    (lambda: unchecked(weights=torch.ones(7)), "weights has 7 entries for 8 values"),
    (lambda: unchecked(length_per_key=[4, 4]), r"length_per_key is \[4, 4\], but the other arguments give \[3, 5\]"),
    (lambda: unchecked(strides=[[2], [5]]), r"6 bags, expected the \[2, 5\] of 2 keys"),
    (lambda: unchecked([2, 0, 1, 1, 9, -5], stride=4, strides=[[2], [4]]), "negative length -5 at feature 'genre'"),
    (lambda: unchecked(strides=[[2], [4]], inverse_keys=["movie"], inverse=T([[0, 1, -1]])), "sample 2 is -1, but the"),
    (lambda: unchecked(weights=torch.ones(8, device="meta")), "weights is on meta, but values is on cpu"),
    (lambda: unchecked().to("meta"), "'meta' hold no numbers to validate"),
    (JaggedTensor.empty, "expected a KeyedJaggedTensor, got JaggedTensor"),
]


def test_a_wrong_batch_is_named_with_its_feature_and_sample() -> None:
    assert not_refused((lambda b=build: validate_keyed_jagged_tensor(b()), words) for build, words in WRONG) == []
    with pytest.raises(ValueError, match="negative length -1 at row 1"):
        JaggedTensor._unchecked(IDS, lengths=torch.tensor([9, -1])).validate()


def test_ids_that_are_no_rows_are_reported_by_feature(caplog: pytest.LogCaptureFixture) -> None:
    tables = [
        EmbeddingBagConfig(8, 4, "t", feature_names=["movie"]),
        EmbeddingBagConfig(7, 4, "u", feature_names=["genre"]),
    ]
    kjt = KeyedJaggedTensor(["movie", "genre", "other"], IDS, lengths=torch.tensor([2, 5, 1]))
    assert validate_keyed_jagged_tensor(kjt, tables)
    tables[1].num_embeddings = 6
    assert not validate_keyed_jagged_tensor(kjt, configs=tables)
    assert caplog.messages == ["feature 'genre' has ids from 2 to 6, but its table has 6 rows"]


def test_spare_values_are_left_out_only_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def built() -> tuple[KeyedJaggedTensor, JaggedTensor]:
        kjt = KeyedJaggedTensor(["a"], IDS, IDS.float(), lengths=T([1, 2]))
        return kjt, JaggedTensor(IDS, offsets=T([0, 1, 3]))

    with pytest.raises(ValueError, match="5 values belong to no bag"):
        built()
    monkeypatch.setattr(checks, "LEAVE_OUT_SPARE_VALUES", True)
    kjt, jt = built()
    assert kjt.values().tolist() == jt.values().tolist() == [0, 1, 2]
    assert kjt.weights().tolist() == [0, 1, 2]
    assert kjt.validate() is kjt
    assert KeyedJaggedTensor(["a"], IDS, lengths=torch.tensor([3]), length_per_key=[3]).values().tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="lengths sum to 9, but values has 8"):
        KeyedJaggedTensor(["a"], IDS, lengths=torch.tensor([9]))
