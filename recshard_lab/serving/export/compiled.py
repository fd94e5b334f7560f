"""A program as machine code: AOTInductor's package, for this torch and this kind of processor."""

from __future__ import annotations

import io
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from recshard_lab.serving.export.refusals import ExportError

FILE = "compiled.pt2"


def machine() -> dict[str, str]:
    """What a package is compiled for: torch's version, the processor's architecture and vector instructions.

    >>> sorted(machine())
    ['architecture', 'instructions', 'torch']
    """
    return {
        "torch": torch.__version__.partition("+")[0],
        "architecture": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def compile_program(program: ExportedProgram, arguments: tuple[Any, ...], path: Path) -> None:
    """Compiles a program and writes the package. Takes tens of seconds.

    Args:
        arguments: of one call.
        path: of the package, ``*.pt2``.

    Raises:
        ExportError: no C++ compiler, or the program cannot be compiled.
    """
    if shutil.which(os.environ.get("CXX") or "g++") is None and shutil.which("clang++") is None:
        raise ExportError("compile=True needs a C++ compiler, and none is installed. Fix: apt-get install g++")
    program.example_inputs = (arguments, {})
    package = io.BytesIO()  # as in `stored_program.write_program`
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own deprecations
            torch._inductor.aoti_compile_and_package(program, package_path=package)
    except Exception as error:  # the compiler's, or torch's
        raise ExportError(f"the program cannot be compiled: {error}. Fix: compile=False") from error
    finally:
        program.example_inputs = None  # would be saved, with the weights
    path.write_bytes(package.getbuffer())


def load_compiled(folder: Path) -> Callable[..., Any]:
    """The compiled program of a bundle, as a function of a program's arguments. Threads may call it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package: Callable[..., Any] = torch._inductor.aoti_load_package(str(folder / FILE))
    return package


def why_not(compiled_for: Mapping[str, str] | None) -> str | None:
    """Why this process does not run a package, or None if it does."""
    if compiled_for is None:
        return "the bundle has no compiled program"
    here = machine()
    other = [
        f"{name} {value}, here {here.get(name)}" for name, value in compiled_for.items() if here.get(name) != value
    ]
    return f"it is compiled for {'; '.join(other)}" if other else None
