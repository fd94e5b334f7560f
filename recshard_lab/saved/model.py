"""The weights of a model in files, read by rows: no whole table is in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from recshard_lab.saved.files import CheckpointError
from recshard_lab.saved.sources import Source, sources_in

_BLOCK_BYTES = 4 * 2**20


class SavedModel:
    """A checkpoint folder, or a state dict in a ``.safetensors``, ``.pt`` or ``.pth`` file. Not collective.

    Names in the file may have a prefix, such as ``model.`` or ``module.``, if all names have the same one.

    Args:
        path: the folder or file.
        table: name in the model's state dict of one of its tables, which determines the prefix.

    Raises:
        ValueError: a file that is missing, damaged or of an unsupported format, or lacks the table.
    """

    def __init__(self, path: str | Path, table: str) -> None:
        self.path = Path(path)
        self._open = sources_in(self.path)
        self._opened: dict[str, Source] = {}
        prefixes = [key[: len(key) - len(table)] for key in self._open if f".{key}".endswith(f".{table}")]
        usual = [prefix for prefix in ("", "model.") if prefix in prefixes]
        if not usual and len(prefixes) != 1:
            found = ", ".join(f"{prefix}{table}" for prefix in prefixes) or "none of that name"
            raise CheckpointError(
                f"{self.path} does not have exactly one tensor {table!r} ({found}). Fix: pass the model that was saved"
            )
        self._prefix = (usual or prefixes)[0]

    def source(self, name: str, size: tuple[int, ...]) -> Source:
        """One tensor by its name in the model's state dict.

        Raises:
            CheckpointError: the checkpoint has no tensor of this name, or it has another size.
        """
        if name not in self._opened:
            opened: Callable[[], Source] | None = self._open.get(self._prefix + name)
            if opened is None:
                raise CheckpointError(f"{name} is not in {self.path}. Fix: pass the model that was saved")
            self._opened[name] = opened()
        source = self._opened[name]
        if source.size != size:
            raise CheckpointError(
                f"{source.label} is {_text(source.size)}, but {name} of the model is {_text(size)}. Fix: pass the "
                f"model that was saved"
            )
        return source

    def row_chunks(self, name: str, size: tuple[int, int]) -> Iterator[tuple[int, Tensor]]:
        """The first row, and rows ``[n, D]``, a few megabytes at a time."""
        source = self.source(name, size)
        step = max(1, _BLOCK_BYTES // max(1, size[1] * source.dtype.itemsize))
        for first in range(0, size[0], step):
            yield first, source.read(slice(first, min(size[0], first + step)), slice(0, size[1]))

    @torch.no_grad()
    def fill(self, module: nn.Module, skip: Collection[str]) -> None:
        """Fills a module, except for some of its submodules. Tensors on the meta device move to the CPU.

        Args:
            skip: paths of submodules.

        Raises:
            CheckpointError: a tensor that is not in the file, or has another size. Nothing was changed.
            ValueError: a buffer on the meta device that is not part of a state dict.
        """
        inside = tuple(f"{path}." for path in skip)
        state = {name: own for name, own in module.state_dict().items() if not name.startswith(inside)}
        tensors = {name: own for name, own in state.items() if isinstance(own, Tensor)}
        for name, own in [*module.named_parameters(), *module.named_buffers()]:
            if own.is_meta and name not in tensors and not name.startswith(inside):
                raise ValueError(
                    f"buffer {name!r} is on the meta device and not part of a state dict. Fix: create it on the CPU"
                )
        sources = {name: self.source(name, tuple(own.shape)) for name, own in tensors.items()}
        filled = {}
        for name, own in tensors.items():
            place = "cpu" if own.is_meta else own.device
            filled[name] = torch.empty_like(own, device=place).copy_(sources[name].whole())
        module.load_state_dict(filled, strict=False, assign=any(own.is_meta for own in tensors.values()))


def _text(size: tuple[int, ...]) -> str:
    return " x ".join(f"{number:,}" for number in size) or "a number"
