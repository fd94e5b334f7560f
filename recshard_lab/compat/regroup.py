"""TorchRec's module inside `KTRegroupAsDict`: joins columns by a permutation in a tensor.

Shape letters: B batch, T input tensors, G groups, R runs of columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recshard_lab.arguments import device_named
from recshard_lab.compat.refusals import Refusal, refuses
from recshard_lab.embedding import KTRegroupAsDict
from recshard_lab.sparse import KeyedTensor


class PermuteMultiEmbedding(nn.Module):
    """Joins columns of several tensors to one tensor a group.

    Call `init_tensors` first. A row of the permutation is one run of columns: input tensor, group, first column in the
    input, first column in the group, number of columns, and a number for fbgemm's backward, which is not read here.

    Args:
        groups: keys of each group, for information.
        multi_device: must be False.

    Raises:
        ValueError: `multi_device`, or a call before `init_tensors`.

    >>> module = PermuteMultiEmbedding([["b", "a"]])
    >>> runs = torch.tensor([[0, 0, 1, 0, 2, 0], [0, 0, 0, 2, 1, 0]])
    >>> module.init_tensors(runs, torch.tensor([3]), torch.tensor([3]), [3])
    >>> module([torch.tensor([[1.0, 2.0, 3.0]])])
    [tensor([[2., 3., 1.]])]
    """

    @refuses(multi_device=Refusal("a module is on one device", "call set_device"))
    def __init__(self, groups: list[list[str]], multi_device: bool = False) -> None:
        super().__init__()
        self._groups, self._out_lengths = groups, [0] * len(groups)
        self._runs: list[list[tuple[int, int, int]]] = []
        for name in ("_permutes", "_in_shapes", "_out_shapes"):
            self.register_buffer(name, torch.empty(0), persistent=False)

    def init_tensors(self, permute: Tensor, in_shapes: Tensor, out_shapes: Tensor, out_lengths: list[int]) -> None:
        """Sets the permutation.

        Args:
            permute: ``[R, 6]`` integers, see the class.
            in_shapes: ``[T]``, columns of each input.
            out_shapes: ``[G]``, columns of each group.
            out_lengths: the same as a list.

        Raises:
            ValueError: runs that do not fill the groups.
        """
        runs: list[list[tuple[int, int, int, int]]] = [[] for _ in out_lengths]
        for source, group, start, target, count, *_ in permute.tolist():
            runs[group].append((target, source, start, count))
        self._runs = [[run[1:] for run in sorted(group)] for group in runs]
        filled = [sum(count for _, _, count in group) for group in self._runs]
        if filled != list(out_lengths):
            raise ValueError(f"the permutation fills {filled} columns of the groups, out_lengths is {out_lengths}")
        self._permutes, self._in_shapes, self._out_shapes = permute, in_shapes, out_shapes
        self._out_lengths = list(out_lengths)

    def set_device(self, device: str) -> None:
        """Moves the permutation to a device."""
        self.to(device_named(device))

    def forward(self, values: Sequence[Tensor]) -> list[Tensor]:
        """T tensors ``[B, columns]`` -> G tensors ``[B, columns]``."""
        if not self._runs:
            raise ValueError("the permutation is not set. Fix: call init_tensors")
        return [
            torch.cat([values[source].narrow(1, start, count) for source, start, count in group], dim=1)
            for group in self._runs
        ]


def module_init(module: KTRegroupAsDict, keyed_tensors: list[KeyedTensor]) -> None:
    """Computes the columns of each group now, from tensors with the keys of later calls.

    Raises:
        ValueError: a key that is missing or in several tensors, or tensors that do not fit together.
    """
    with torch.no_grad():
        module(keyed_tensors)
