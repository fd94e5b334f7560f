"""How a rank ends: it lets go of process groups before Python does.

A group's threads drop the tensors of their last collective on their own time, which takes the interpreter. If the
interpreter has begun to end by then, the process aborts ("terminate called without an active exception"). A group that
nobody holds joins its threads first; after ``destroy_process_group()`` models are the last to hold it, and those that
ended in a cycle of references hold it until they are collected.
"""

import atexit
import gc
import time
from typing import Any
from weakref import WeakValueDictionary

_held: "WeakValueDictionary[int, Any]" = WeakValueDictionary()
_seen: list[bool] = []  # whether there ever was a group
_GRACE_S = 0.05  # for groups that others hold too: DistributedDataParallel


def remember(env: Any) -> None:
    """``env.pg`` will be let go of at the end."""
    _held[id(env)] = env
    _seen[:] = [True]


@atexit.register
def _let_go() -> None:
    if not _seen:
        return
    gc.collect()
    for env in [env for env in _held.values() if env.pg is not None]:
        object.__setattr__(env, "pg", None)
    time.sleep(_GRACE_S)
