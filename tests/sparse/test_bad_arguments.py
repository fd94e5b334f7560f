"""Wrong arguments of constructors and methods have a result or raise a ValueError, nothing else."""

from collections.abc import Callable
from typing import Any

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
    None, 3, -1, 1.5, "x", [], [1], ["a"], {}, {"a": 1}, T(3), T([1.5]), T([[1, 2]]), T([True]),
    torch.ones(2, device="meta"), object(), kjt(), jt(), kt(),
]  # fmt: skip
PARTS = ["values", "weights", "lengths", "offsets", "stride", "stride_per_key_per_rank", "stride_per_key"]
PARTS += ["length_per_key", "offset_per_key", "lengths_offset_per_key", "index_per_key", "inverse_indices", "keys"]
CALLS: list[Callable[[Any], Any]] = [
    *(lambda x, name=name: KeyedJaggedTensor(**{"keys": ["a", "b"], "values": IDS, "lengths": L, name: x})
      for name in PARTS),
    lambda x: JaggedTensor(x, lengths=T([1])),
    lambda x: JaggedTensor(IDS, lengths=x),
    lambda x: JaggedTensor(IDS, offsets=x),
    lambda x: JaggedTensor(IDS, x, T([8])),
    JaggedTensor.from_dense,
    lambda x: JaggedTensor.from_dense([x]),
    lambda x: JaggedTensor.from_dense([IDS], x),
    lambda x: JaggedTensor.from_dense_lengths(x, T([1])),
    lambda x: JaggedTensor.from_dense_lengths(torch.ones(1, 2), x),
    lambda x: JaggedTensor.from_dense_lengths(torch.ones(1, 2), T([1]), x),
    lambda x: jt().to_padded_dense(x),
    lambda x: jt().to_padded_dense(2, x),
    lambda x: jt().to(x),
    lambda x: jt().copy_(x),
    JaggedTensor.empty_like,
    lambda x: KeyedJaggedTensor(["a", "b"], IDS, offsets=x),
    lambda x: KeyedJaggedTensor(["a", "b"], IDS, lengths=L, inverse_indices=(["a"], x)),
    lambda x: KeyedJaggedTensor(["a", "b"], IDS, lengths=L, inverse_indices=(x, T([[0, 1]]))),
    KeyedJaggedTensor.from_jt_dict,
    lambda x: KeyedJaggedTensor.from_jt_dict({"a": x}),
    KeyedJaggedTensor.concat,
    lambda x: KeyedJaggedTensor.concat([kjt(), x]),
    KeyedJaggedTensor.empty_like,
    lambda x: KeyedJaggedTensor.empty_like(kjt(), x),
    lambda x: kjt().split(x),
    lambda x: kjt().permute(x),
    lambda x: kjt().permute([0], x),
    lambda x: kjt()[x],
    lambda x: kjt().to(x),
    lambda x: KeyedJaggedTensor(["a"], IDS, torch.ones(8), T([8])).to("cpu", dtype=x),
    lambda x: kjt().copy_(x),
    validate_keyed_jagged_tensor,
    lambda x: KeyedTensor(x, [1], torch.ones(2, 1)),
    lambda x: KeyedTensor(["a"], x, torch.ones(2, 1)),
    lambda x: KeyedTensor(["a"], [1], x),
    lambda x: KeyedTensor(["a"], [1], torch.ones(2, 1), x),
    lambda x: KeyedTensor(["a"], [1], torch.ones(2, 1), 1, x),
    lambda x: KeyedTensor(["a"], [1], torch.ones(2, 1), 1, None, x),
    lambda x: KeyedTensor.from_tensor_list(["a"], x),
    lambda x: KeyedTensor.from_tensor_list(["a"], [x]),
    lambda x: KeyedTensor.from_tensor_list(x, [torch.ones(2, 1)]),
    lambda x: KeyedTensor.from_tensor_list(["a"], [torch.ones(2, 1)], x),
    lambda x: kt()[x],
    lambda x: KeyedTensor.regroup(x, [["a"]]),
    lambda x: KeyedTensor.regroup([x], [["a"]]),
    lambda x: KeyedTensor.regroup([kt()], x),
    lambda x: KeyedTensor.regroup([kt()], [x]),
    lambda x: KeyedTensor.regroup_as_dict([kt()], [["a"]], x),
    lambda x: kt().to(x),
    lambda x: KTRegroupAsDict([["a"]], ["x"])(x),
    lambda x: KTRegroupAsDict(x, ["x"]),
    lambda x: EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t", feature_names=["a"])])(x),
]  # fmt: skip


def test_a_wrong_argument_is_a_value_error() -> None:
    for number, call in enumerate(CALLS):
        for junk in JUNK:
            try:
                call(junk)
            except ValueError:
                continue
            except Exception as error:
                raise AssertionError(f"call {number} of {junk!r}") from error
