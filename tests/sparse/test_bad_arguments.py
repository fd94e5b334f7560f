"""Whatever is given for an argument of a constructor or method: a result or a ValueError, nothing else."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import tensor as T

from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig, KTRegroupAsDict
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor, validate_keyed_jagged_tensor

IDS = torch.arange(8)
L = T([2, 0, 1, 1, 1, 3])


def jt() -> JaggedTensor:
    return kjt()["a"]


def kjt() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], IDS, lengths=L)


def kt() -> KeyedTensor:
    return KeyedTensor(["a", "b"], [1, 2], torch.ones(2, 3))


JUNK: list[Any] = [
    None,
    3,
    -1,
    1.5,
    "x",
    [],
    [1],
    ["a"],
    {},
    {"a": 1},
    T(3),
    T([1.5]),
    T([[1, 2]]),
    T([True]),
    torch.ones(2, device="meta"),
    object(),
    kjt(),
    jt(),
    kt(),
]
CALLS: dict[str, Callable[[Any], Any]] = {
    "jt_init": lambda x: JaggedTensor(x, lengths=T([1])),
    "jt_len": lambda x: JaggedTensor(IDS, lengths=x),
    "jt_off": lambda x: JaggedTensor(IDS, offsets=x),
    "jt_w": lambda x: JaggedTensor(IDS, x, T([8])),
    "from_dense": lambda x: JaggedTensor.from_dense(x),
    "from_dense_l": lambda x: JaggedTensor.from_dense([x]),
    "fdw": lambda x: JaggedTensor.from_dense([IDS], x),
    "fdl": lambda x: JaggedTensor.from_dense_lengths(x, T([1])),
    "fdl2": lambda x: JaggedTensor.from_dense_lengths(torch.ones(1, 2), x),
    "fdl3": lambda x: JaggedTensor.from_dense_lengths(torch.ones(1, 2), T([1]), x),
    "pad": lambda x: jt().to_padded_dense(x),
    "padv": lambda x: jt().to_padded_dense(2, x),
    "jto": lambda x: jt().to(x),
    "jcopy": lambda x: jt().copy_(x),
    "jel": lambda x: JaggedTensor.empty_like(x),
    "k_keys": lambda x: KeyedJaggedTensor(x, IDS, lengths=L),
    "k_vals": lambda x: KeyedJaggedTensor(["a"], x, lengths=L),
    "k_w": lambda x: KeyedJaggedTensor(["a", "b"], IDS, x, L),
    "k_l": lambda x: KeyedJaggedTensor(["a", "b"], IDS, lengths=x),
    "k_o": lambda x: KeyedJaggedTensor(["a", "b"], IDS, offsets=x),
    "k_s": lambda x: KeyedJaggedTensor(["a", "b"], IDS, lengths=L, stride=x),
    "k_spr": lambda x: KeyedJaggedTensor(["a", "b"], IDS, lengths=L, stride_per_key_per_rank=x),
    "k_spk": lambda x: KeyedJaggedTensor(["a", "b"], IDS, lengths=L, stride_per_key=x),
    "k_lpk": lambda x: KeyedJaggedTensor(["a", "b"], IDS, lengths=L, length_per_key=x),
    "k_opk": lambda x: KeyedJaggedTensor(["a", "b"], IDS, lengths=L, offset_per_key=x),
    "k_lopk": lambda x: KeyedJaggedTensor(["a", "b"], IDS, lengths=L, lengths_offset_per_key=x),
    "k_ipk": lambda x: KeyedJaggedTensor(["a", "b"], IDS, lengths=L, index_per_key=x),
    "k_inv": lambda x: KeyedJaggedTensor(["a", "b"], IDS, lengths=L, inverse_indices=x),
    "k_inv2": lambda x: KeyedJaggedTensor(["a", "b"], IDS, lengths=L, inverse_indices=(["a"], x)),
    "k_inv3": lambda x: KeyedJaggedTensor(["a", "b"], IDS, lengths=L, inverse_indices=(x, T([[0, 1]]))),
    "fjd": lambda x: KeyedJaggedTensor.from_jt_dict(x),
    "fjd2": lambda x: KeyedJaggedTensor.from_jt_dict({"a": x}),
    "cat": lambda x: KeyedJaggedTensor.concat(x),
    "cat2": lambda x: KeyedJaggedTensor.concat([kjt(), x]),
    "kel": lambda x: KeyedJaggedTensor.empty_like(x),
    "kel2": lambda x: KeyedJaggedTensor.empty_like(kjt(), x),
    "split": lambda x: kjt().split(x),
    "perm": lambda x: kjt().permute(x),
    "perm2": lambda x: kjt().permute([0], x),
    "item": lambda x: kjt()[x],
    "to": lambda x: kjt().to(x),
    "tod": lambda x: KeyedJaggedTensor(["a"], IDS, torch.ones(8), T([8])).to("cpu", dtype=x),
    "kcopy": lambda x: kjt().copy_(x),
    "val": lambda x: validate_keyed_jagged_tensor(x),
    "kt_k": lambda x: KeyedTensor(x, [1], torch.ones(2, 1)),
    "kt_l": lambda x: KeyedTensor(["a"], x, torch.ones(2, 1)),
    "kt_v": lambda x: KeyedTensor(["a"], [1], x),
    "kt_d": lambda x: KeyedTensor(["a"], [1], torch.ones(2, 1), x),
    "kt_o": lambda x: KeyedTensor(["a"], [1], torch.ones(2, 1), 1, x),
    "kt_i": lambda x: KeyedTensor(["a"], [1], torch.ones(2, 1), 1, None, x),
    "ftl": lambda x: KeyedTensor.from_tensor_list(["a"], x),
    "ftl2": lambda x: KeyedTensor.from_tensor_list(["a"], [x]),
    "ftl3": lambda x: KeyedTensor.from_tensor_list(x, [torch.ones(2, 1)]),
    "ftl4": lambda x: KeyedTensor.from_tensor_list(["a"], [torch.ones(2, 1)], x),
    "ktitem": lambda x: kt()[x],
    "rg": lambda x: KeyedTensor.regroup(x, [["a"]]),
    "rg2": lambda x: KeyedTensor.regroup([x], [["a"]]),
    "rg3": lambda x: KeyedTensor.regroup([kt()], x),
    "rg4": lambda x: KeyedTensor.regroup([kt()], [x]),
    "rgd": lambda x: KeyedTensor.regroup_as_dict([kt()], [["a"]], x),
    "ktto": lambda x: kt().to(x),
    "reg": lambda x: KTRegroupAsDict([["a"]], ["x"])(x),
    "reg2": lambda x: KTRegroupAsDict(x, ["x"]),
    "ebc": lambda x: EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t", feature_names=["a"])])(x),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_a_value_error(name: str) -> None:
    for junk in JUNK:
        with contextlib.suppress(ValueError):  # anything else fails the test
            CALLS[name](junk)
