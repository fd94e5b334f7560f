"""The compiled loops: each compiled once a machine, by one process while others wait, then found in numba's cache.

numba keeps compiled code beside the source where it may write there (an environment of one's own), else in the user's
cache folder, or where ``NUMBA_CACHE_DIR`` says. Where it can write nowhere, every process compiles for itself.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from recshard_lab.embedding.kernels import notice_once

_I, _F, _INTS, _FLOATS, _LANES = "int64", "float32", "int64[::1]", "float32[::1]", "int64[:, ::1]"
_BATCH = [_I, _I, _INTS]  # ids, wide, offsets
_STEP = [*_BATCH, *[_I] * 5]  # and weights, grad, stride, batch, flat
_LOOPS = {
    "first_bad_lane": ("loops", [_INTS, *_BATCH, _I, _I]),
    "pool": ("loops", [_LANES, *_BATCH, *[_I] * 6]),
    "gather": ("loops", [_LANES, *_BATCH, *[_I] * 3]),
    "weight_grads": ("loops", [_LANES, *_BATCH, *[_I] * 6]),
    "step_rows": ("coalesce", [_LANES, *[_INTS] * 3, *_STEP, _I, _F, _F, _F, *[_I] * 3, _INTS, _INTS, _FLOATS, _INTS]),
}
"""Each loop's file, and the types of its arguments: it is compiled for these and no others."""


@cache
def why_absent() -> str | None:
    """Why numba cannot be used here, or None."""
    if find_spec("numba") is None:
        return 'numba is not installed (pip install "recshard-lab[cpu]" brings it)'
    try:
        import numba  # noqa: F401
    except Exception as error:  # built for another numpy or Python it fails with whatever it likes
        return f"numba cannot be imported: {error}"
    return None


@cache
def halves_are_fast() -> bool:
    """Whether the processor converts half precision itself; LLVM would call a function that may not be there."""
    from llvmlite.binding import get_host_cpu_features

    return platform.machine() in ("aarch64", "arm64") or bool(get_host_cpu_features().get("f16c"))


@cache
def loop(name: str) -> Callable[..., Any]:
    """A loop, ready to run."""
    file, arguments = _LOOPS[name]
    module = import_module(f"{__package__}.{file}")
    function: Any = getattr(module, name)
    if function.stats.cache_path is None:
        notice_once(
            "numba may write neither beside this library nor to the user's cache folder: every process compiles its "
            "loops anew (5 s); set NUMBA_CACHE_DIR to a folder that can be written to"
        )
    with _alone(function.stats.cache_path):
        function.compile(f"{'int64' if name == 'first_bad_lane' else 'void'}({', '.join(arguments)})")
    return function


@contextmanager
def _alone(cache_path: str | None) -> Iterator[None]:
    """One process at a time, so that those that wait find what the first has compiled. Code of other sources than
    these is thrown away: numba itself looks at the file of a function, not at what it is made of."""
    if cache_path is None:
        yield
        return
    folder = Path(cache_path)
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "recshard-numba.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except (ImportError, OSError):  # no such locks, or no such folder: numba goes on without them, too
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.pread(lock, 64, 0) != _sources():
            for old in folder.glob("*.nb[ic]"):
                with suppress(FileNotFoundError):
                    old.unlink()
            os.pwrite(lock, _sources(), 0)
        yield
    finally:
        os.close(lock)


@cache
def _sources() -> bytes:
    digest = hashlib.sha256()
    for file in ("rows.py", "loops.py", "coalesce.py"):
        digest.update(Path(__file__).with_name(file).read_bytes())
    return digest.hexdigest().encode()
