"""KTRegroupAsDict does what KeyedTensor.regroup_as_dict does, batch after batch."""

import pytest
import torch

from recshard_lab.embedding import DataType, KTRegroupAsDict
from recshard_lab.sparse import KeyedTensor


def pooled(keys: list[str], dims: list[int], size: int) -> KeyedTensor:
    return KeyedTensor(keys, dims, torch.randn(size, sum(dims)))


def test_every_batch_is_regrouped_as_by_the_function_also_when_the_layout_changes() -> None:
    groups, names = [["c", "a"], ["b", "c"], []], ["user", "item", "none"]
    module = KTRegroupAsDict(groups, names)
    for keys, dims in ((["a", "b"], [2, 3]), (["a", "b"], [2, 3]), (["b", "a"], [3, 2]), (["b", "a"], [1, 4])):
        kts = [pooled(keys, dims, 4), pooled(["c"], [5], 4)]
        wanted = KeyedTensor.regroup_as_dict(kts, groups, names)
        got = module(kts)
        assert list(got) == names
        assert all(torch.equal(got[name], wanted[name]) for name in names)
    module.clear_cache()
    assert torch.equal(module(kts)["user"], wanted["user"])


def test_results_can_be_asked_for_in_another_number_format() -> None:
    module = KTRegroupAsDict([["a"]], ["x"], emb_dtype=DataType.FP16)
    assert module([pooled(["a"], [2], 3)])["x"].dtype == torch.float16


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="got 2 keys for 1 groups"):
        KTRegroupAsDict([["a"]], ["x", "y"])
    with pytest.raises(ValueError, match=r"emb_dtype must be one of .* got INT8"):
        KTRegroupAsDict([["a"]], ["x"], emb_dtype=DataType.INT8)
    with pytest.raises(ValueError, match="no key 'b'; there are: 'a'"):
        KTRegroupAsDict([["b"]], ["x"])([pooled(["a"], [2], 3)])
    with pytest.raises(ValueError, match="'a' is in more than one place"):
        KTRegroupAsDict([["a"]], ["x"])([pooled(["a"], [2], 3), pooled(["a"], [2], 3)])
