"""KeyedJaggedTensor against plain lists of lists."""

import copy
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from recshard_lab.sparse import KeyedJaggedTensor
from tests.refusals import not_refused
from tests.sparse.jagged_batches import Batch, assert_holds, batches, rows_of

T = torch.tensor
IDS = T([10, 11, 12, 3, 4, 5, 6, 7])
LENGTHS = T([2, 0, 1, 1, 1, 3])


def of(**parts: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(**{"keys": ["movie", "genre"], "values": IDS, **parts})


def small() -> KeyedJaggedTensor:
    return of(lengths=LENGTHS)


def variable(strides: Any = ((2,), (4,)), lengths: Tensor = LENGTHS, **more: Any) -> KeyedJaggedTensor:
    return of(lengths=lengths, stride_per_key_per_rank=strides, **more)


def inverse(keys: list[str], indices: Tensor, **more: Any) -> KeyedJaggedTensor:
    return variable(inverse_indices=(keys, indices), **more)


@given(batches())
def test_holds_what_the_lists_hold_given_lengths_or_offsets(batch: Batch) -> None:
    assert_holds(batch.kjt(), batch.keys, batch.rows, batch.weights, batch.stride)


@given(batches(), st.data())
def test_permute_reorders_repeats_and_drops_features(batch: Batch, data: st.DataObject) -> None:
    place = st.integers(0, len(batch.keys) - 1)
    order = data.draw(st.lists(place, max_size=7) if batch.keys else st.just([]))
    tensor = data.draw(st.sampled_from([None, torch.tensor(order, dtype=torch.int32)]))
    weights = None if batch.weights is None else [batch.weights[f] for f in order]
    got = batch.kjt().permute(order, tensor)
    assert_holds(got, [batch.keys[f] for f in order], [batch.rows[f] for f in order], weights, batch.stride)


@given(batches(), st.data())
def test_split_then_concat_is_the_same_batch(batch: Batch, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch.keys)), max_size=4)))
    edges = [0, *cuts, len(batch.keys)]
    parts = batch.kjt().split([b - a for a, b in pairwise(edges)])
    for part, (a, b) in zip(parts, pairwise(edges), strict=True):
        weights = None if batch.weights is None else batch.weights[a:b]
        assert_holds(part, batch.keys[a:b], batch.rows[a:b], weights, batch.stride)
    joined = KeyedJaggedTensor.concat(parts)
    assert_holds(joined, batch.keys, batch.rows, batch.weights, batch.stride)
    assert joined.values().dtype == batch.values_dtype


@given(batches())
def test_each_feature_comes_out_as_its_bags_and_goes_back_in(batch: Batch) -> None:
    kjt = batch.kjt()
    features = kjt.to_dict()
    assert list(features) == batch.keys
    for f, key in enumerate(batch.keys):
        assert [bag.tolist() for bag in kjt[key].to_dense()] == batch.rows[f]
        assert [bag.tolist() for bag in features[key].to_dense()] == batch.rows[f]
    if batch.keys:
        again = KeyedJaggedTensor.from_jt_dict(features)
        assert_holds(again, batch.keys, batch.rows, batch.weights, max(map(len, batch.rows)))
        assert again.variable_stride_per_key() == (len(set(map(len, batch.rows))) > 1)


@given(batches())
def test_copies_pickles_and_trees_keep_everything(batch: Batch) -> None:
    kjt = batch.kjt()
    kjt.to_dict()
    leaves, spec = pytree.tree_flatten(kjt)
    copies = [pickle.loads(pickle.dumps(kjt)), copy.deepcopy(kjt), pytree.tree_map(torch.clone, kjt)]
    copies += [pytree.tree_unflatten(leaves, spec), kjt.to("cpu"), kjt.flatten_lengths(), kjt.unsync().sync()]
    for again in copies:
        assert_holds(again, batch.keys, batch.rows, batch.weights, batch.stride)


@given(batches())
def test_the_sync_constructors_know_the_counts(batch: Batch) -> None:
    weights = batch.flat_weights()
    cut = batch.cut()
    by_lengths = KeyedJaggedTensor.from_lengths_sync(batch.keys, batch.flat(), batch.lengths(), weights, **cut)
    by_offsets = KeyedJaggedTensor.from_offsets_sync(batch.keys, batch.flat(), batch.offsets(), weights, **cut)
    for kjt in (by_lengths, by_offsets):
        assert kjt.length_per_key_or_none() == [sum(map(len, row)) for row in batch.rows]
        assert kjt.offset_per_key_or_none() is not None
        assert_holds(kjt, batch.keys, batch.rows, batch.weights, batch.stride)


def test_lengths_may_be_a_table_of_features_and_samples() -> None:
    kjt = KeyedJaggedTensor(["movie", "genre"], IDS, lengths=LENGTHS.view(2, 3))
    assert kjt.stride() == 3
    assert rows_of(kjt) == rows_of(small())
    assert [part.length_per_key() for part in kjt.split([1, 1])] == [[3], [5]]
    assert kjt["genre"].lengths().tolist() == [1, 1, 3]
    assert kjt.permute([1]).values().tolist() == [3, 4, 5, 6, 7]
    assert kjt.flatten_lengths().lengths().shape == (6,)


def test_a_variable_batch_tells_its_strides_as_given_and_a_plain_one_has_none() -> None:
    of_two_ranks = variable(torch.tensor([[1, 1], [0, 4]]))
    assert of_two_ranks.stride_per_key_per_rank() == [[1, 1], [0, 4]]
    assert of_two_ranks.stride_per_key() == [2, 4]
    assert of_two_ranks.stride() == 4  # the most bags of a key
    assert of_two_ranks.lengths_offset_per_key() == [0, 2, 6]
    assert of_two_ranks.variable_stride_per_key()
    assert small().stride_per_key_per_rank() == []
    assert not small().variable_stride_per_key()


@given(batches(variable=True))
def test_inverse_indices_stay_with_every_part_and_copy(batch: Batch) -> None:
    kjt, wanted = batch.kjt(), batch.inverse_indices()
    parts = kjt.split([1] * len(batch.keys))
    leaves, spec = pytree.tree_flatten(kjt)
    joined, reversed_ = KeyedJaggedTensor.concat([kjt.permute([]), *parts]), [*range(len(batch.keys))][::-1]
    copies = [pickle.loads(pickle.dumps(kjt)), pytree.tree_unflatten(leaves, spec), kjt.to("cpu")]
    for same in (kjt, *parts, joined, kjt.permute(reversed_), kjt.flatten_lengths(), *copies):
        found = same.inverse_indices_or_none()
        assert (found is None) == (wanted is None)
        assert same.variable_stride_per_key()
        if wanted is not None and found is not None:
            assert found[0] == wanted[0]
            assert torch.equal(found[1], wanted[1])
            assert same.inverse_indices() is not None


def test_split_and_item_are_views_and_pickle_only_what_they_show() -> None:
    big = KeyedJaggedTensor(["a", "b"], torch.arange(100_002), lengths=torch.tensor([2, 100_000]))
    part = big.split([1, 1])[0]
    assert part.values().data_ptr() == big.values().data_ptr()
    assert len(pickle.dumps(part)) < 4_000
    assert len(pickle.dumps(big["a"])) < 4_000


def test_weights_keep_their_gradients_through_permute_split_and_item() -> None:
    weights = torch.ones(8, requires_grad=True)
    kjt = KeyedJaggedTensor(["movie", "genre"], IDS, weights, LENGTHS)
    parts = [kjt.permute([1]).weights(), 2 * kjt["movie"].weights(), kjt.split([1, 1])[0].weights()]
    torch.cat(parts).sum().backward()
    assert weights.grad.tolist() == [3, 3, 3, 1, 1, 1, 1, 1]


def test_moving_to_meta_keeps_shapes_and_known_counts() -> None:
    moved = small().to("meta")
    assert (moved.device().type, moved.values().shape, moved.stride()) == ("meta", (8,), 3)
    assert moved.length_per_key() == [3, 5]
    with pytest.raises(ValueError, match="meta"):
        moved.unsync().length_per_key()


def test_empty_has_nothing_and_empty_like_keeps_samples_and_types() -> None:
    empty = KeyedJaggedTensor.empty(is_weighted=True, values_dtype=torch.int64, weights_dtype=torch.float64)
    assert_holds(empty, [], [], [], 0)
    assert (empty.values().dtype, empty.weights().dtype) == (torch.int64, torch.float64)
    like = KeyedJaggedTensor.empty_like(KeyedJaggedTensor(["a"], IDS.int(), torch.ones(8), torch.tensor([8])))
    assert_holds(like, [], [], [], 1)
    assert like.values().dtype == torch.int32
    assert pickle.loads(pickle.dumps(like)).stride() == 1
    assert pytree.tree_map(torch.clone, like).stride() == 1


def test_a_repeated_key_is_kept_but_cannot_be_asked_for_by_name() -> None:
    twice = small().permute([0, 1, 0])
    assert twice.keys() == ["movie", "genre", "movie"]
    for ask in (lambda: twice["movie"], twice.to_dict, twice.index_per_key):
        with pytest.raises(ValueError, match=r"'movie' is at positions \[0, 2\]"):
            ask()


def test_an_unknown_key_is_a_key_error_and_a_value_error_naming_the_known() -> None:
    with pytest.raises(KeyError, match="no key 'user'; there are: 'movie', 'genre'"):
        small()["user"]
    with pytest.raises(ValueError, match="no key 'user'"):
        small()["user"]


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: of(), "needs lengths or offsets"),
    (lambda: of(lengths=T([8.0])), r"lengths must hold integers .* got torch.float32"),
    (lambda: of(lengths=T([2, 0, 1, 1, 5, -1])), "negative length -1 at feature 'genre', sample 2"),
    (lambda: of(lengths=T([2, 0, 1, 1, 7, 0])), "feature 'genre', sample 1 would end at 11"),
    (lambda: of(lengths=T([2, 0, 1, 1, 1, 1])), "lengths sum to 6, but values has 8: 2 values belong to no bag"),
    (lambda: of(offsets=T([0, 5, 2, 3, 8])), "offsets fall from 5 to 2 at feature 'movie', sample 1"),
    (lambda: of(keys=["a"], offsets=T([1, 8])), "offsets starts with 1"),
    (lambda: of(keys=["a"], offsets=T([0, 7])), "offsets ends with 7, but values has 8"),
    (lambda: of(lengths=T([3, 5]), offsets=T([0, 4, 8])), "disagree at feature 'movie', sample 0: length 3"),
    (lambda: of(keys=["a"], lengths=T([3, 5]), offsets=T([0, 8])), "offsets has 2 entries for 2 lengths: expected 3"),
    (lambda: of(lengths=T([3, 3, 2])), "lengths describes 3 bags, expected 2 keys x a whole number of samples"),
    (lambda: of(lengths=LENGTHS, stride=4), "lengths describes 6 bags, expected 2 keys x stride 4"),
    (lambda: of(keys=[], values=IDS[:0], lengths=LENGTHS[:0], stride=-1), "stride must be .* at least 0, got -1"),
    (lambda: of(keys=[], lengths=LENGTHS), "lengths describes 6 bags, expected 0 keys"),
    (lambda: of(lengths=LENGTHS.view(2, 3, 1)), r"lengths must have one .* got shape \[2, 3, 1\]"),
    (lambda: of(weights=torch.ones(7), lengths=LENGTHS), "weights has 7 entries for 8 values"),
    (lambda: of(lengths=T([8], device="meta")), "lengths is on meta, but values is on cpu"),
    (lambda: of(keys="movie", lengths=LENGTHS), r"keys must be a list, got str 'movie': use \['movie'\]"),
    (lambda: of(keys=["a", 3], lengths=LENGTHS), r"keys\[1\] must be a str, got int 3"),
    (lambda: of(values=[1, 2], lengths=LENGTHS), "a tensor of at least one dimension, got list"),
    (lambda: of(lengths=LENGTHS, length_per_key=[4, 4]), r"length_per_key is \[4, 4\]"),
    (lambda: of(lengths=LENGTHS, offset_per_key=[1, 4, 9]), r"other arguments give \[0, 3, 8\]"),
    (lambda: of(lengths=LENGTHS, index_per_key={"movie": 1}), "arguments give {'movie': 0"),
    (lambda: variable([[2]]), "stride_per_key_per_rank must have one list of ranks for each of 2 keys"),
    (lambda: variable([2, 4]), r"of 'movie' must be a list, got int 2: use \[2\]"),
    (lambda: variable([[7], [-1]]), "of 'genre' must be a whole number .* got -1"),
    (lambda: variable([[1, 1], [4]]), "same ranks for every key, got numbers of ranks {'movie': 2, 'genre': 1}"),
    (lambda: variable(torch.ones(2, 1)), "must be .F, R. integers, got torch.float32"),
    (lambda: variable([[2], [3]]), r"6 bags, expected the \[2, 3\] of 2 keys in stride"),
    (lambda: variable(lengths=T([2, 0, 5, -1, 1, 1])), "negative length -1 at feature 'genre', sample 1"),
    (lambda: inverse(["movie"], T([0, 1])), r"inverse_indices must be \[1, B\], .* got \[2\]"),
    (lambda: inverse(["movie"], torch.ones(1, 3)), "must hold integers .int32 or int64., got torch.float32"),
    (lambda: variable(inverse_indices=torch.zeros(2, 3)), r"inverse_indices must be \(keys, tensor \[keys, B\]\)"),
    (lambda: inverse(["movie", "genre"], T([[0, 1, 1], [0, 4, 1]])), "sample 1 is 4, but the feature has 4 bags"),
    (lambda: inverse(["movie"], T([[0, 0, 0]]), stride=2), "stride is 2, but inverse_indices has 3 samples"),
    (lambda: of(lengths=LENGTHS, stride_per_key=[2, 4]), r"pass stride_per_key_per_rank=\[\[bags\], ...\]"),
    (lambda: of(lengths=LENGTHS, lengths_offset_per_key=[0, 2, 6]), r"the other arguments give \[0, 3, 6\]"),
    (lambda: KeyedJaggedTensor.concat([inverse(["movie"], T([[0, 0, 0, 0]])), variable()]), "all or none must"),
    (lambda: KeyedJaggedTensor.from_jt_dict({}), "jt_dict is empty"),
    (lambda: KeyedJaggedTensor.concat([small(), of(weights=torch.ones(8), lengths=LENGTHS)]), "list.0.'. have none"),
    (lambda: KeyedJaggedTensor.concat([]), "kjt_list is empty"),
    (lambda: KeyedJaggedTensor.concat([small(), of(keys=["a"], lengths=T([8]))]), r"same stride \(samples\)"),
    (lambda: small().split([1]), r"segments \[1\] sum to 1, but there are 2 keys"),
    (lambda: small().split([3, -1]), "segments must be a whole number of at least 0, got -1"),
    (lambda: small().permute([0, 2]), r"index 2 in permute\(\[0, 2\]\) is not one of 0 to 1"),
    (lambda: small().permute([0], T([0, 1])), r"indices_tensor tensor.* and indices \[0\] differ"),
    (lambda: small().weights(), "has no weights"),
    (lambda: small().inverse_indices(), "has no inverse indices"),
]


def test_bad_input_is_refused_naming_what_was_given() -> None:
    assert not_refused(BAD) == []
