"""`recshard bench pack`: one process packs and unpacks as one rank of many."""

import os
from dataclasses import replace

import torch

from benchmarks import pack
from benchmarks.ledger.mirror import MirrorGroup

SMALL = replace(pack.CASES[0], tables=3, rows=400, dim=4, batch=8, ranks=16, local_ranks=4)


def test_both_halves_are_timed_without_the_collectives_and_leave_no_traces() -> None:
    threads, copied = torch.get_num_threads(), MirrorGroup.wall_s
    packed, unpacked = pack.measure(SMALL, rounds=3)
    assert (packed.name, unpacked.name) == ("pack, W=16, batch 8, pooling 1", "unpack, W=16, batch 8, pooling 1")
    assert min(packed.beside["CPU"], unpacked.beside["CPU"]) > 0
    assert MirrorGroup.wall_s > copied
    assert torch.get_num_threads() == threads
    assert not torch.distributed.is_initialized()
    assert os.environ.get("LOCAL_WORLD_SIZE") is None


def test_every_target_is_of_a_measured_figure() -> None:
    assert {pack.label(case, half) for case in pack.CASES for half in ("pack", "unpack")} > {*pack.TARGETS}
