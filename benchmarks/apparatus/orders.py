"""A rank that obeys orders: one JSON object a line on its input, an answer for each on its output.

::

    {"do": "steps", "count": 10}        {"seconds": 0.21} or {"error": "ValueError: ..."}

"do" names a method of the worker, which takes the order and returns the answer.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def serve(make: Callable[[str, int], Any]) -> None:
    """Joins the other ranks and answers orders until its input ends.

    Args:
        make: (side, rank) -> the worker.

    The program's arguments are the side, this rank, the number of ranks, and the file they meet at.
    """
    side, rank, ranks, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stderr
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
        )
    worker = make(side, rank)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(worker, order["do"])(order)
        except Exception as error:
            text = str(error).strip().splitlines()
            answer = {"error": f"{type(error).__name__}: {text[0] if text else ''}"}
            if os.environ.get("RECSHARD_BENCH_TRACE"):
                raise
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # the libraries' shutdown is not measured
