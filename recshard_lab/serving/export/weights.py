"""Weights in a file: the safetensors format, ordered so that the file can be mapped into memory.

A file starts with the length of its header (8 bytes), then the header (JSON), then the tensors without gaps. The header
is padded, and tensors with a multiple of 64 bytes come first. So these start at multiples of 64 bytes, as torch's own
tensors do. Matrix products may differ in the last bit otherwise.

Processes that map the same file share its pages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

ALIGNMENT = 64
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors of any devices to a safetensors file.

    Raises:
        ValueError: a dtype that the format does not have.

    >>> from tempfile import mkdtemp
    >>> write_tensors(Path(mkdtemp()) / "one", {"x": torch.zeros(2, dtype=torch.complex64)})
    Traceback (most recent call last):
    ...
    ValueError: tensor 'x' is complex64, which safetensors files do not have. Fix: convert it to float32
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(
                f"tensor {name!r} is {dtype}, which safetensors files do not have. Fix: convert it to float32"
            )
    ordered = sorted(tensors.items(), key=lambda item: (item[1].nbytes % ALIGNMENT > 0, -item[1].itemsize, item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            if flat.numel():
                file.write(flat.view(torch.uint8).numpy().data)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file. Aligned tensors stay in the file, which is mapped; others are copied.

    Returns:
        The tensors in the order of their names.

    >>> from tempfile import mkdtemp
    >>> file = Path(mkdtemp()) / "weights.safetensors"
    >>> write_tensors(file, {"x": torch.arange(3), "none": torch.zeros(2, 0)})
    >>> {name: tensor.tolist() for name, tensor in read_tensors(file).items()}
    {'none': [[], []], 'x': [0, 1, 2]}
    """
    raw = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    start = 8 + int.from_bytes(bytes(raw[:8].tolist()), "little")
    tensors = {}
    for name, entry in sorted(json.loads(bytes(raw[8:start].tolist())).items()):
        first, end = entry["data_offsets"]
        part = raw[start + first : start + end]
        if part.data_ptr() % ALIGNMENT:
            part = part.clone()
        tensors[name] = part.view(DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors
