"""A script of torchrun: an index over two ranks beside the unsharded one. Rank 0 writes what it found as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recshard_lab.serving.retrieval import ExactIndex, GroupRanks, RankIndex
from tests.serving.retrieval.spaces import whole_numbers


def compared(ranks: GroupRanks, folder: Path) -> dict[str, Any]:
    """On rank 0: what the index over the ranks does, beside one index with all items."""
    vectors, ids, queries = whole_numbers()
    split, whole = RankIndex.build(ranks, vectors[:60], ids[:60], ExactIndex), ExactIndex(vectors[:60], ids[:60])
    for index in (split, whole):
        index.add(vectors[60:], ids[60:])
        index.remove(ids[20:30])
    exclude = [[int(own)] for own in ids[:6]]
    found: dict[str, Any] = {"kinds": split.info().settings["ranks"], "items": len(split), "equal": []}
    for k in (1, 7, 80):
        ours, theirs = (index.search_up_to(queries, k, exclude) for index in (split, whole))
        found["equal"] += [torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)]
    split.save(folder / "1")
    try:
        RankIndex.build(ranks, vectors, ids, refuse)
    except RuntimeError as error:
        found["error"] = str(error)
    found["after"] = split.search(queries, 3).ids.tolist() == whole.search(queries, 3).ids.tolist()
    split.close()
    return found


def refuse(vectors: torch.Tensor, ids: torch.Tensor) -> ExactIndex:
    raise ValueError("this rank refuses")


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    ranks = GroupRanks()
    if ranks.is_first:
        with ranks:
            found = compared(ranks, folder)
        (folder / "found.json").write_text(json.dumps(found))
    else:
        ranks.follow()
        (folder / f"followed{dist.get_rank()}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
