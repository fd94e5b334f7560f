"""The script in a bundle that answers without this library."""

from __future__ import annotations

from collections.abc import Sequence

_SCRIPT = '''"""Answers a batch with this bundle. Imports {imports} and nothing of recshard_lab.

    python answer.py        answers example.safetensors
"""

import json
import pathlib

import torch
{more}
FOLDER = pathlib.Path(__file__).parent
DTYPES = {dtypes}


def read(name):
    """The tensors of a safetensors file, mapped into memory. Unaligned ones are copied."""
    raw = torch.from_file(str(FOLDER / name), size=(FOLDER / name).stat().st_size, dtype=torch.uint8)
    start = 8 + int.from_bytes(bytes(raw[:8].tolist()), "little")
    tensors = {{}}
    for key, entry in sorted(json.loads(bytes(raw[8:start].tolist())).items()):
        part = raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        part = part.clone() if part.data_ptr() % 64 else part
        tensors[key] = part.view(getattr(torch, DTYPES[entry["dtype"]])).view(entry["shape"])
    return tensors


weights = read("weights.safetensors")
program = torch.export.load(FOLDER / "program.pt2").module()


@torch.inference_mode()
def answer(dense, values, lengths, weights_per_id=None):
    """dense [B, columns] float32, values [N] int64, lengths [F * B] int64{weighted} -> a tensor an output"""
    return program(weights, dense, values, lengths, weights_per_id)


if __name__ == "__main__":
    batch = read("example.safetensors")
    columns = answer(batch["dense"], batch["values"], batch["lengths"], batch.get("weights"))
    print(json.dumps(dict(zip({outputs}, [column.tolist() for column in columns]))))
'''


def answer_script(outputs: Sequence[str], imports: Sequence[str], weighted: bool) -> str:
    """The text of ``answer.py``.

    Args:
        outputs: of the model.
        imports: modules beside torch that the program needs.
        weighted: whether batches have weights.
    """
    from recshard_lab.serving.export.weights import DTYPES

    return _SCRIPT.format(
        imports=" and ".join(["torch", *imports]),
        more="".join(f"import {name}\n" for name in imports),
        dtypes={name: str(dtype).removeprefix("torch.") for name, dtype in DTYPES.items()},
        weighted=", weights_per_id [N] float32" if weighted else "",
        outputs=list(outputs),
    )
