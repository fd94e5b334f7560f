"""KeyedTensor against dicts of tensors."""

import pickle
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from recshard_lab.sparse import KeyedTensor
from tests.refusals import not_refused

DIMS = st.lists(st.integers(0, 4), min_size=1, max_size=5)


def parts_of(dims: list[int], batch: int, prefix: str = "k") -> dict[str, Tensor]:
    return {f"{prefix}{i}": torch.randn(batch, dim) for i, dim in enumerate(dims)}


def join(parts: dict[str, Tensor]) -> KeyedTensor:
    return KeyedTensor.from_tensor_list(list(parts), list(parts.values()))


@given(DIMS, st.integers(0, 3))
def test_each_key_gives_its_columns_back(dims: list[int], batch: int) -> None:
    parts = parts_of(dims, batch)
    kt = join(parts)
    for again in (kt, pickle.loads(pickle.dumps(kt)), pytree.tree_map(torch.clone, kt), kt.to("cpu")):
        assert again.keys() == list(parts)
        assert again.length_per_key() == dims
        assert again.offset_per_key() == [sum(dims[:i]) for i in range(len(dims) + 1)]
        assert again.key_dim() == 1
        assert list(again.to_dict()) == list(parts)
        for key, part in parts.items():
            assert torch.equal(again[key], part)
            assert torch.equal(again.to_dict()[key], part)


@given(DIMS, DIMS, st.integers(0, 3), st.data())
def test_regroup_joins_the_asked_columns(left: list[int], right: list[int], batch: int, data: st.DataObject) -> None:
    parts = [parts_of(left, batch, "l"), parts_of(right, batch, "r")]
    both = parts[0] | parts[1]
    groups = data.draw(st.lists(st.lists(st.sampled_from(list(both)), max_size=6), max_size=4))
    got = KeyedTensor.regroup([join(part) for part in parts], groups)
    names = [f"g{i}" for i in range(len(groups))]
    named = KeyedTensor.regroup_as_dict([join(part) for part in parts], groups, names)
    assert len(got) == len(groups)
    assert list(named) == names
    for tensor, name, group in zip(got, names, groups, strict=True):
        wanted = torch.cat([both[key] for key in group], dim=1) if group else torch.empty(batch, 0)
        assert torch.equal(tensor, wanted)
        assert torch.equal(named[name], wanted)


def test_regroup_carries_gradients_and_copies() -> None:
    values = torch.ones(2, 3, requires_grad=True)
    kt = KeyedTensor(["a", "b"], [1, 2], values)
    whole, b = KeyedTensor.regroup([kt], [["a", "b"], ["b"]])
    assert whole.data_ptr() != values.data_ptr()
    (whole.sum() + 2 * b.sum()).backward()
    assert values.grad.tolist() == [[1, 3, 3], [1, 3, 3]]


def test_keys_may_share_out_the_first_dimension() -> None:
    kt = KeyedTensor.from_tensor_list(["a", "b"], [torch.ones(1, 4), torch.zeros(2, 4)], key_dim=0, cat_dim=0)
    assert kt["b"].shape == (2, 4)
    assert KeyedTensor.regroup([kt], [["b", "a"]])[0][:, 0].tolist() == [0, 0, 1]
    assert pytree.tree_map(torch.clone, kt).key_dim() == 0


def small() -> KeyedTensor:
    return KeyedTensor(["a", "b"], [1, 2], torch.ones(2, 3))


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "sum": (lambda: KeyedTensor(["a", "b"], [1, 1], torch.ones(2, 3)), r"sums to 2, but values is \[2, 3\]"),
    "count": (lambda: KeyedTensor(["a"], [1, 2], torch.ones(2, 3)), "length_per_key has 2 entries for 1 keys"),
    "negative": (lambda: KeyedTensor(["a", "b"], [4, -1], torch.ones(2, 3)), "of 'b' must be .* at least 0, got -1"),
    "dimension": (lambda: KeyedTensor(["a"], [2], torch.ones(2), 1), "key_dim is 1, but values has 1 dim"),
    "offsets": (lambda: KeyedTensor(["a"], [3], torch.ones(2, 3), 1, [0, 2]), r"other arguments give \[0, 3\]"),
    "index": (lambda: KeyedTensor(["a"], [3], torch.ones(2, 3), 1, None, {"b": 0}), "index_per_key is {'b': 0}, but"),
    "tensors": (lambda: KeyedTensor.from_tensor_list(["a"], []), "1 keys for 0 tensors"),
    "no tensors": (lambda: KeyedTensor.from_tensor_list([], []), "tensors is an empty list"),
    "batches": (lambda: join({"a": torch.ones(2, 1), "b": torch.ones(3, 1)}), r"'b'\] must .* shapes \[\[2, 1\], \[3"),
    "unknown": (lambda: small()["c"], "no key 'c'; there are: 'a', 'b'"),
    "repeated": (lambda: KeyedTensor(["a", "a"], [1, 2], torch.ones(2, 3))["a"], r"'a' is at positions \[0, 1\]"),
    "unknown in a group": (lambda: KeyedTensor.regroup([small()], [["a", "c"]]), "no key 'c'"),
    "in two tensors": (lambda: KeyedTensor.regroup([small(), small()], [["a"]]), "'a' is in more than one place"),
    "nothing to regroup": (lambda: KeyedTensor.regroup([], [["a"]]), "keyed_tensors is an empty list"),
    "others": (lambda: KeyedTensor.regroup([small(), join({"c": torch.ones(5, 1)})], [["a", "c"]]), "got shapes"),
    "names": (lambda: KeyedTensor.regroup_as_dict([small()], [["a"]], []), "0 keys for 1 groups"),
}


def test_bad_input_is_refused_naming_what_was_given() -> None:
    assert not_refused(BAD) == []
