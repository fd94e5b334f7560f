"""Releases process groups before the interpreter shuts down.

The threads of a group free the tensors of their last collective later, for which they need the interpreter. If it is
already shutting down, the process aborts ("terminate called without an active exception"). A group without references
joins its threads first. After ``destroy_process_group()`` the last references are models; a model in a reference cycle
keeps the group until garbage collection.
"""

import atexit
import gc
import time
from typing import Any
from weakref import WeakValueDictionary

_envs: "WeakValueDictionary[int, Any]" = WeakValueDictionary()
_seen: list[bool] = []  # not empty once a group existed
_GRACE_S = 0.05  # for groups with other references, such as DistributedDataParallel's


def remember(env: Any) -> None:
    """Releases ``env.pg`` at exit."""
    _envs[id(env)] = env
    _seen[:] = [True]


@atexit.register
def _release() -> None:
    if not _seen:
        return
    gc.collect()
    for env in [env for env in _envs.values() if env.pg is not None]:
        object.__setattr__(env, "pg", None)
    time.sleep(_GRACE_S)
