"""Executes a script for TorchRec as ``__main__``, also in the processes that it spawns."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from recshard_lab.compat.translate import script_source, translated

_SCRIPT, _TRANSLATE = "RECSHARD_TORCHREC_SCRIPT", "RECSHARD_TORCHREC_TRANSLATE"
_IN_CHILD = "recshard_lab.compat.script_in_child"


def run_script(path: Path, translate: bool = False) -> None:
    """Runs a Python script or a notebook as ``__main__``.

    A process that a Python script spawns executes the script too, as Python does, and also serves TorchRec's names.
    A notebook's processes get its functions pickled, as under IPython.

    Args:
        path: the file.
        translate: whether to replace NCCL and CUDA where a rank has no GPU.

    Raises:
        ValueError: a notebook that cannot be read.
    """
    main = ModuleType("__main__")
    main.__spec__ = None
    if path.suffix.lower() != ".ipynb":
        main.__file__ = str(path)
        main.__spec__ = ModuleSpec(_IN_CHILD, None, origin=str(path))  # multiprocessing imports it in a child
        os.environ |= {_SCRIPT: str(path.resolve()), _TRANSLATE: "1" if translate else ""}
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules["__main__"] = main
    _execute(path, translate, main.__dict__)


def run_script_in_child(names: dict[str, object]) -> None:
    """Executes the parent's script with these global names."""
    _execute(Path(os.environ[_SCRIPT]), bool(os.environ[_TRANSLATE]), names)


def _execute(path: Path, translate: bool, names: dict[str, object]) -> None:
    text = script_source(path)
    if translate:
        text = translated(text, world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if "torch.ops.fbgemm" in text and find_spec("fbgemm_gpu") is not None:
        import_module("fbgemm_gpu")  # as TorchRec does when it is imported: it registers the operators
    exec(compile(text, str(path), "exec", dont_inherit=True), names)
