"""Adapts the text of a tutorial to this machine: backend, device, and notebook commands."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import torch


def backend(world_size: int = 1) -> str:
    """``"nccl"`` if each of `world_size` ranks can have a GPU, otherwise ``"gloo"``.

    >>> backend(world_size=10**6)
    'gloo'
    """
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= world_size else "gloo"


def device(rank: int = 0, world_size: int = 1) -> torch.device:
    """The device of a rank under `backend`: its GPU, or the CPU.

    >>> device(rank=3, world_size=10**6)
    device(type='cpu')
    """
    return torch.device("cuda", rank) if backend(world_size) == "nccl" else torch.device("cpu")


def script_source(path: Path) -> str:
    """The text of a script. Of a notebook (``.ipynb``): its code cells, without shell and IPython lines.

    Raises:
        ValueError: the file is not UTF-8 text, or not a notebook.
        OSError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() != ".ipynb":
            return text
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read: {type(error).__name__}: {error}. Fix: pass a Python script or a notebook"
        ) from None
    return _COMMANDS.sub(r"\1# \2", "\n\n".join("".join(cell) for cell in cells) + "\n")


_ON_CPU = (
    (re.compile(r"torch\.cuda\.(?:set_device|synchronize|empty_cache|reset_peak_memory_stats)\([^()\n]*\)"), "None"),
    (re.compile(r"""f?(["'])cuda(?::(?:(?!\1)[^\n])*)?\1"""), r"\1cpu\1"),
    (re.compile(r"""(["'])nccl\1"""), r"\1gloo\1"),
    (re.compile(r"\.cuda\([^()\n]*\)"), ".cpu()"),
)
_COMMANDS = re.compile(r"^(\s*)(!.*|%%?[a-zA-Z].*|sys\.path\s*=.*)$", re.MULTILINE)
_FBGEMM_NAMES = re.compile(r"\bfbgemm_gpu\.split_embedding_configs\b")


def translated(source: str, world_size: int = 1) -> str:
    """Adapts the text of a cell or script to this machine.

    - Shell and IPython lines (``!pip ...``, ``%%...``) and assignments to ``sys.path`` become comments.
    - Without a GPU for each rank, ``"nccl"`` becomes ``"gloo"``, ``"cuda"`` and ``f"cuda:{rank}"`` become ``"cpu"``,
      ``.cuda()`` becomes ``.cpu()``, and calls that set the current GPU become ``None``.
    - Without fbgemm, its ``EmbOptimType`` comes from this library.

    Args:
        source: Python text. Its number of lines does not change.
        world_size: ranks on this machine.

    >>> print(translated('!pip install torchrec\\nx = x.to("cpu")', world_size=10**6))
    # !pip install torchrec
    x = x.to("cpu")
    >>> translated('dist.init_process_group(backend="nccl")', world_size=10**6)
    'dist.init_process_group(backend="gloo")'
    """
    text = _COMMANDS.sub(r"\1# \2", source)
    if backend(world_size) != "nccl":
        for pattern, replacement in _ON_CPU:
            text = pattern.sub(replacement, text)
    if find_spec("fbgemm_gpu") is None:
        text = _FBGEMM_NAMES.sub("recshard_lab.embedding", text)
    return text
