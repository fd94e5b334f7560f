"""KeyedTensor: every public method and keyword, regrouping, torch's trees and pickles."""

import pickle
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedTensor, permute_multi_embedding, regroup_kts

from tests.compat.parity.case import case, raised

MODULE = "torchrec.sparse.jagged_tensor"
KT = f"{MODULE}.KeyedTensor"


def tensors() -> tuple[KeyedTensor, KeyedTensor]:
    first = KeyedTensor(keys=["a", "b"], length_per_key=[1, 2], values=torch.arange(6.0).reshape(2, 3))
    return first, KeyedTensor(["c"], [2], -torch.arange(4.0).reshape(2, 2))


@case(KT)
def every_reader() -> Any:
    kt = tensors()[0]
    return {
        "keys": kt.keys(),
        "values": kt.values(),
        "key_dim": kt.key_dim(),
        "device": kt.device(),
        "length_per_key": kt.length_per_key(),
        "offset_per_key": kt.offset_per_key(),
        "a": kt["a"],
        "dict": kt.to_dict(),
        "bytes": kt.size_in_bytes(),
        "moved": kt.to(torch.device("cpu"), non_blocking=True),
    }


@case(KT)
def every_keyword() -> Any:
    kt = KeyedTensor(
        keys=["a", "b"],
        length_per_key=[1, 2],
        values=torch.arange(6.0).reshape(3, 2),
        key_dim=0,
        offset_per_key=[0, 1, 3],
        index_per_key={"a": 0, "b": 1},
    )
    return [kt, kt["b"], kt.key_dim(), kt.to_dict()]


@case(KT)
def from_a_list() -> Any:
    parts = [torch.ones(2, 1), torch.zeros(2, 3)]
    joined = KeyedTensor.from_tensor_list(["x", "y"], parts)
    rows = KeyedTensor.from_tensor_list(["x", "y"], [torch.ones(1, 2), torch.zeros(3, 2)], key_dim=0, cat_dim=0)
    return [joined, rows, rows["y"], rows.key_dim()]


@case(KT)
def an_unknown_key() -> Any:
    return raised(lambda: tensors()[0]["nothing"])


@case(KT, f"{MODULE}.regroup_kts")
def regrouping() -> Any:
    pair = list(tensors())
    groups = [["c", "a"], ["b"]]
    return [
        KeyedTensor.regroup(pair, groups),
        KeyedTensor.regroup_as_dict(pair, groups, ["first", "second"]),
        regroup_kts(pair, groups),
    ]


@case(f"{MODULE}.permute_multi_embedding")
def regrouping_by_permutation() -> Any:
    return permute_multi_embedding(list(tensors()), [["c", "a"], ["b", "c"]])


@case(KT)
def regrouping_has_gradients() -> Any:
    values = torch.arange(6.0).reshape(2, 3).requires_grad_()
    groups = KeyedTensor.regroup([KeyedTensor(["a", "b"], [1, 2], values)], [["b"], ["a", "b"]])
    (groups[0].sum() + 2 * groups[1].sum()).backward()  # type: ignore[no-untyped-call]
    return values.grad


@case("torchrec.modules.regroup.KTRegroupAsDict")
def regrouping_as_a_module() -> Any:
    module = KTRegroupAsDict(groups=[["c", "a"], ["b"]], keys=["first", "second"])
    pair = list(tensors())
    return [module(pair), module(pair)]


@case(KT)
def pickled() -> Any:
    return pickle.loads(pickle.dumps(tensors()[0]))


@case(KT)
def as_a_tree() -> Any:
    leaves, spec = pytree.tree_flatten(tensors()[0])
    return [leaves, pytree.tree_unflatten(leaves, spec), pytree.tree_map(lambda leaf: leaf * 2, tensors()[0])]


@case(KT)
def moved_to_the_meta_device() -> Any:
    kt = tensors()[0].to(torch.device("meta"))
    return [kt.values(), kt["b"], kt.device()]
