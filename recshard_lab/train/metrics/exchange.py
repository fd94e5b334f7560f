"""Samples of all ranks on every rank, or each group's samples on one of them.

A sample is sent as integers, fp64 columns as their bits: nothing is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recshard_lab.comm import ShardingEnv, all_to_all, issue_all_gather


def gather_rows(rows: Tensor, env: ShardingEnv) -> Tensor:
    """int64 ``[n, c]`` of each rank -> ``[sum of n, c]`` on every rank, in the order of the ranks."""
    if env.world_size == 1:
        return rows
    counts = issue_all_gather(torch.tensor([len(rows)], device=rows.device), env, "metrics/counts").wait().tolist()
    most, width = max(counts), rows.shape[1]
    padded = rows.new_zeros(most, width)
    padded[: len(rows)] = rows
    arrived = issue_all_gather(padded.flatten(), env, "metrics/samples").wait().view(env.world_size, most, width)
    return torch.cat([own[:count] for own, count in zip(arrived, counts, strict=True)])


def rows_to(owners: Tensor, rows: Tensor, env: ShardingEnv) -> Tensor:
    """int64 ``[n, c]``, each row to the rank that ``owners [n]`` names -> the rows that this rank receives."""
    if env.world_size == 1:
        return rows
    width = rows.shape[1]
    counts = torch.bincount(owners, minlength=env.world_size)
    ones = [1] * env.world_size
    theirs = all_to_all(counts, ones, ones, env, "metrics/counts").tolist()
    sends, receives = [n * width for n in counts.tolist()], [n * width for n in theirs]
    flat = rows[torch.argsort(owners, stable=True)].flatten()
    return all_to_all(flat, sends, receives, env, "metrics/samples").view(-1, width)


def packed(numbers: list[Tensor], whole: list[Tensor]) -> Tensor:
    """fp64 columns ``[n]`` and int64 columns ``[n]`` -> int64 ``[n, c]``."""
    return torch.stack([*(column.double().contiguous().view(torch.int64) for column in numbers), *whole], 1)


def unpacked(rows: Tensor, numbers: int) -> list[Tensor]:
    """The columns, the first `numbers` of them fp64."""
    columns = [column.contiguous() for column in rows.unbind(1)]
    return [*(column.view(torch.float64) for column in columns[:numbers]), *columns[numbers:]]
