"""Moves tensors to an unnamed file, mapped into memory that the system may reclaim at any time."""

import mmap
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

_K = TypeVar("_K")
_CHUNK_BYTES = 8 * 2**20


def parked(tensors: Mapping[_K, Tensor], folder: str | Path | None = None) -> dict[_K, Tensor]:
    """Copies of the tensors on disk; do not write to them. The file is deleted with the last copy.

    Args:
        tensors: contiguous along their rows.
        folder: folder of the file. Default: the system's folder for temporary files.

    Raises:
        OSError: the disk is full, or the folder does not exist.

    >>> parked({"t": torch.arange(3)})["t"].tolist()
    [0, 1, 2]
    """
    total = sum(tensor.nbytes for tensor in tensors.values())
    if not total:
        return {key: tensor.cpu() for key, tensor in tensors.items()}
    with tempfile.TemporaryFile(dir=folder, prefix="recshard-parked-") as file:
        for tensor in tensors.values():
            rows = max(1, _CHUNK_BYTES * max(1, tensor.shape[0]) // max(1, tensor.nbytes)) if tensor.dim() else 1
            for chunk in tensor.detach().split(rows) if tensor.dim() else [tensor.detach().view(1)]:
                file.write(chunk.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        mapped = mmap.mmap(file.fileno(), total)
    copies, position = {}, 0
    for key, tensor in tensors.items():
        count = tensor.numel()
        copies[key] = tensor.new_empty(tensor.shape, device="cpu") if not count else _mapped(mapped, tensor, position)
        position += tensor.nbytes
    return copies


def _mapped(mapped: mmap.mmap, tensor: Tensor, position: int) -> Tensor:
    flat = torch.frombuffer(mapped, dtype=torch.uint8, count=tensor.nbytes, offset=position)
    if position % tensor.element_size():
        flat = flat.clone()  # unaligned: after an odd number of half-precision numbers
    return flat.view(tensor.dtype).view(tensor.shape)
