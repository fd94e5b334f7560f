"""The compiled loops: numba compiles each once for a machine's processor, and later processes load the machine code.

Importing numba takes 0.6 s and 120 MB per process. llvmlite, which loads the machine code, takes a sixth of both. The
code is stored in the user's cache folder (``NUMBA_CACHE_DIR``, else ``XDG_CACHE_HOME``, else ``~/.cache``), or in a
temporary folder of the user if that is not writable. Without either, every process compiles, and logs a warning.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from recshard_lab.embedding.kernels.base import notice_once

_I, _F, _INTS, _MATRIX = "int64", "float32", "int64[::1]", "int64[:, ::1]"
_AT_INTS, _AT_WORDS, _AT_FLOATS = "CPointer(int64)", "CPointer(uint32)", "CPointer(float32)"
_BATCH = [_AT_INTS, _AT_INTS, _I, _I, _AT_INTS, _I, _I, _I]
_STEP = [
    [_AT_INTS, _I, _AT_INTS, _AT_INTS],  # wiring
    [_I, _F, _F, _F],  # rule
    [_I, _I, _I],  # part
    [_AT_INTS, _AT_INTS, _AT_INTS, _AT_FLOATS, _AT_WORDS, _AT_WORDS],  # found
    [_AT_WORDS, _AT_FLOATS, _I, _I, _I],  # room
]
_SHAPE = [_I, _I, _I, _I]  # partitions, offset, buckets, choices
_KERNEL, _DYNAMIC = "recshard_lab.embedding.kernels.numba", "recshard_lab.embedding.dynamic"
_LOOPS: dict[str, tuple[str, list[Any]]] = {
    "look_at": (f"{_KERNEL}.loops", [_BATCH, _I, _I, _I, _AT_INTS]),
    "pool": (f"{_KERNEL}.loops", [_BATCH, *[_I] * 4]),
    "gather": (f"{_KERNEL}.loops", [_BATCH, *[_I] * 4]),
    "weight_grads": (f"{_KERNEL}.loops", [_BATCH, *[_I] * 5]),
    "step_rows": (f"{_KERNEL}.coalesce", [_BATCH, _I, _I, *_STEP]),
    "find": (f"{_DYNAMIC}.index_loops", [_INTS, _MATRIX, _MATRIX, _INTS, _INTS]),
    "touch": (f"{_DYNAMIC}.index_loops", [_INTS, *[_I] * 4, _INTS, _I, _I]),
    "insert": (
        f"{_DYNAMIC}.index_loops",
        [*[_INTS] * 3, _I, _I, _INTS, "int16[::1]", _MATRIX, *_SHAPE, _I, _I, *[_INTS] * 3],
    ),
}
"""Each loop's module, and the types of its arguments. A list is a tuple, whose members are given one by one."""
INDEX_LOOPS = ("find", "touch", "insert")
KERNEL_LOOPS = tuple(name for name in _LOOPS if name not in INDEX_LOOPS)


@cache
def why_absent(loops: tuple[str, ...] = KERNEL_LOOPS) -> str | None:
    """Why these loops do not work here. None if they do: they are loaded then."""
    if find_spec("numba") is None:
        return 'numba is not installed (pip install "recshard-lab[cpu]" brings it)'
    try:
        for name in loops:
            loop(name)
    except Exception as error:  # another numpy, Python or processor fails with any exception
        return f"its loops cannot be compiled or loaded here: {type(error).__name__}: {error}"
    return None


@cache
def loop(name: str) -> Callable[..., int]:
    """A loop as a function of numbers, addresses and numpy arrays. It releases the GIL."""
    module, kinds = _LOOPS[name]
    address = _load(*_machine_code(name, module, kinds))
    run = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *_argument_types(kinds))(address)
    arrays = any("[" in kind for kind in kinds)

    def call(*arguments: Any) -> int:
        result, error = ctypes.c_int64(), ctypes.c_void_p()
        given = _spread(arguments) if arrays else arguments
        status = run(ctypes.addressof(result), ctypes.addressof(error), *given)
        if status:
            raise RuntimeError(f"loop {name!r} of the numba kernel ended with status {status}")
        return result.value

    return call


def _spread(arguments: tuple[Any, ...]) -> list[Any]:
    """Arrays as numba passes them: owner, parent, size, item, data, shape, strides."""
    given: list[Any] = []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            given += (0, 0, argument.size, argument.itemsize, argument.ctypes.data, *argument.shape, *argument.strides)
        else:
            given.append(argument)
    return given


def _argument_types(kinds: list[Any]) -> Iterator[type]:
    for kind in kinds:
        if isinstance(kind, list):
            yield from _argument_types(kind)
        elif "[" in kind:
            # five numbers, then a shape and a stride for each axis
            yield from [ctypes.c_int64] * (5 + 2 * (1 + kind.count(",")))
        else:
            yield ctypes.c_float if kind == _F else ctypes.c_int64


# ---- machine code ----


def _compile(module: str, name: str, kinds: list[Any]) -> tuple[str, bytes]:
    """The symbol and the object file of a loop, by numba."""
    function: Any = getattr(import_module(module), name)
    result = "void" if function.py_func.__annotations__["return"] is None else "int64"
    given = [f"Tuple(({', '.join(kind)}))" if isinstance(kind, list) else kind for kind in kinds]
    function.compile(f"{result}({', '.join(given)})")
    (compiled,) = function.overloads.values()
    return compiled.fndesc.llvm_func_name, compiled.library._get_compiled_object()


_engines: list[Any] = []  # they own the code


def _load(symbol: str, code: bytes) -> int:
    """Loads the code and returns its address."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    address: int = engine.get_function_address(symbol)
    if not address:
        raise RuntimeError(f"the compiled code has no symbol {symbol}")
    return address


# ---- kept on disk ----


def _machine_code(name: str, module: str, kinds: list[Any]) -> tuple[str, bytes]:
    """Loads a loop from disk. If it is missing, one process compiles it and the others wait."""
    folder = _folder()
    if folder is None:
        notice_once(
            "the numba kernel's compiled loops cannot be stored: no cache folder is yours and writable. Every process "
            "compiles them (about 5 s). Fix: set NUMBA_CACHE_DIR to a folder that you own and can write to"
        )
        return _compile(module, name, kinds)
    path = folder / f"{name}-{_version()}.loop"
    if (found := _stored(path)) is not None:
        return found
    with _alone(folder):
        # another process may have compiled it while this one waited
        if (found := _stored(path)) is not None:
            return found
        symbol, code = _compile(module, name, kinds)
        body = symbol.encode() + b"\n" + code
        # renamed when complete, so that no process reads half a file
        part = path.with_suffix(f".{os.getpid()}")
        try:
            part.write_bytes(hashlib.sha256(body).digest() + body)
            part.replace(path)
        except OSError as error:  # the disk is full
            part.unlink(missing_ok=True)
            notice_once(f"the numba kernel's compiled loops could not be stored: {error}")
        return symbol, code


def _stored(path: Path) -> tuple[str, bytes] | None:
    """The stored code, or None if it is missing or damaged."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    # damaged code would crash the process
    if hashlib.sha256(kept[32:]).digest() != kept[:32]:
        return None
    symbol, code = kept[32:].split(b"\n", 1)
    return symbol.decode(), code


@cache
def _folder() -> Path | None:
    """The first folder that only this user can write to."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    owner = os.getuid() if hasattr(os, "getuid") else 0
    choices = [Path(given)] if given else []
    choices += [Path(user, "recshard_lab", "numba"), Path(tempfile.gettempdir(), f"recshard-lab-{owner}")]
    for folder in choices:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            about = folder.stat()
        except OSError:
            continue
        ours = not hasattr(os, "getuid") or (
            about.st_uid == owner and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        )
        if ours and os.access(folder, os.W_OK | os.X_OK):  # code from others would run as this user
            return folder
    return None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time."""
    try:
        import fcntl
    except ImportError:  # without file locks two processes may compile the same loop
        yield
        return
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def _version() -> str:
    """A hash of the loops' sources, of the compiler's version (llvmlite's implies numba's) and of the processor."""
    import llvmlite
    from llvmlite import binding

    digest = hashlib.sha256()
    here = Path(__file__)
    files = [here.with_name(name) for name in ("rows.py", "loops.py", "coalesce.py", "compiled.py")]
    for file in (*files, here.parents[2] / "dynamic" / "index_loops.py"):
        digest.update(file.read_bytes())
    processor = (binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten(), binding.get_process_triple())
    chosen = [os.environ.get(name, "") for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_MATRIX", "NUMBA_OPT")]
    digest.update("\n".join([llvmlite.__version__, *processor, *chosen]).encode())
    return digest.hexdigest()[:24]
