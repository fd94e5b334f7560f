"""Trackers of trained rows, and wrappers of local shards."""

from typing import Any

import torch
from torchrec.distributed.model_tracker import Trackers, TrackingMode, UniqueRows
from torchrec.distributed.shards_wrapper import LocalShardsWrapper

from tests.compat.parity.case import case, raised

TRACKER, WRAPPER = "torchrec.distributed.model_tracker", "torchrec.distributed.shards_wrapper.LocalShardsWrapper"


@case(f"{TRACKER}.Trackers", f"{TRACKER}.TrackingMode", f"{TRACKER}.UniqueRows")
def kinds_of_trackers() -> Any:
    rows = UniqueRows(ids=torch.tensor([1, 2]), states=None)
    return {
        "trackers": {kind.name: kind.value for kind in Trackers},
        "modes": {kind.name: kind.value for kind in TrackingMode},
        "rows": [rows.ids, rows.states],
    }


def wrapper() -> LocalShardsWrapper:
    return LocalShardsWrapper([torch.ones(2, 3), torch.zeros(2, 1)], [(0, 0), (0, 3)])


@case(WRAPPER)
def shards_of_a_wrapper() -> Any:
    own = wrapper()
    return {
        "shape": list(own.shape),
        "shards": own.local_shards(),
        "sizes": [list(size) for size in own.local_sizes()],
        "offsets": [list(offset) for offset in own.local_offsets()],
        "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in own.local_chunks],
        "tensor": isinstance(own, torch.Tensor),
    }


@case(WRAPPER)
def wrappers_are_copied() -> Any:
    own = wrapper()
    copied, detached = own.clone(), own.detach()
    with torch.no_grad():
        own.local_shards()[0].fill_(5.0)
    return {
        "clone": copied.local_shards(),
        "detached": detached.local_shards()[0],
        "empty": LocalShardsWrapper([], []).is_empty_shard(),
        "not empty": own.is_empty_shard(),
        "device": str(own.device),
        "meta": own.is_meta,
        "pinned": own.is_pinned(),
    }


@case(WRAPPER)
def rows_of_a_wrapper() -> Any:
    own = LocalShardsWrapper([torch.ones(2, 3), torch.zeros(1, 3)], [(0, 0), (4, 0)])
    meta = own.storage_metadata()
    return {
        "shape": list(own.shape),
        "size": list(meta.size),
        "chunks": [list(chunk.offsets) for chunk in meta.chunks],
        "copy": raised(lambda: own.copy_(wrapper())) != "nothing",
    }
