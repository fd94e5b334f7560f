"""Why a model cannot be exported: checked before tracing, or read from torch's error."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import torch
from torch import nn

_UNSHARDED = "save_checkpoint(model, path) on all ranks, then load_checkpoint into the unsharded model in one process"


class ExportError(ValueError):
    """A model that cannot be exported."""


def check_exportable(model: nn.Module) -> None:
    """Checks what tracing would not notice, or would only report deep inside torch.

    Raises:
        ExportError: the first module that cannot be exported, by name.

    >>> check_exportable(nn.Sequential(nn.Linear(2, 1)))
    Traceback (most recent call last):
    ...
    recshard_lab.serving.export.refusals.ExportError: Sequential is in training mode: dropout and statistics would \
become part of the program. Fix: model.eval()
    """
    # imported here: a process that only serves needs none of them, and starts in two thirds of the time
    from recshard_lab.distributed import DistributedModelParallel
    from recshard_lab.distributed.sharded_collections import ShardedCollection
    from recshard_lab.embedding.dynamic.collections import DynamicCollection
    from recshard_lab.embedding.managed_collision.collections import BaseManagedCollisionEmbeddingCollection

    kind = type(model).__name__
    if isinstance(model, DistributedModelParallel):
        raise ExportError(
            f"{kind} is sharded over ranks, and a bundle has one process's weights. "
            f"Fix: quantize_embeddings(model, 'fp32') on all ranks. It returns the whole model"
        )
    for path, part in model.named_modules():
        name = f"{path!r}, a {type(part).__name__}," if path else type(part).__name__
        if isinstance(part, ShardedCollection):
            raise ExportError(
                f"{name} is sharded over ranks, and a bundle has one process's weights. Fix: {_UNSHARDED}"
            )
        if isinstance(part, DynamicCollection):
            raise ExportError(
                f"{name} has dynamic tables, which grow with new ids. "
                f"Fix: replace it by export_static(collection), which has a fixed vocabulary"
            )
        if isinstance(part, BaseManagedCollisionEmbeddingCollection):
            raise ExportError(
                f"{name} remaps ids, and its table of ids cannot be exported. "
                f"Fix: remap ids before the model and export the collection inside"
            )
        if part.training:
            raise ExportError(
                f"{name} is in training mode: dropout and statistics would become part of the program. "
                f"Fix: model.eval()"
            )
        if part._forward_hooks or part._forward_pre_hooks:
            raise ExportError(
                f"{name} has forward hooks, which would run once, while it is traced, and never again. "
                f"Fix: call remove() on the handle of each hook"
            )
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if weight.is_meta:
            raise ExportError(f"{name!r} is on the meta device, so it has no numbers. Fix: load a checkpoint first")
        if weight.device.type != "cpu":
            raise ExportError(f"{name!r} is on {weight.device}, and bundles are traced on CPU. Fix: model.cpu()")


def reason_of(error: Exception, model: nn.Module) -> ExportError:
    """torch's error, or the model's, as one sentence with its fix."""
    kind, text = type(model).__name__, str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    at = _place(error)
    name = type(error).__name__
    if name in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        why = f"its forward decides by the numbers of a batch{at} ({first})"
        fix = "use torch.where instead of if, and tensor sizes instead of .item()"
    elif "Constraints violated" in text:
        fixed = re.search(r"^\s*(\w) = (\d+)\s*$", text, re.MULTILINE)
        what = {"B": "batch size", "N": "number of ids"}.get(fixed[1] if fixed else "", "size")
        why = f"its forward works only for one {what}{f', {fixed[2]}' if fixed else ''}"
        fix = "use tensor.shape[0] instead of len(tensor) or a constant"
    elif name in ("UnsupportedOperatorException", "DynamicOutputShapeException"):
        why = f"the operator {first} has no implementation for tracing"
        fix = "torch.library.register_fake for it, or use another operator"
    else:
        why, fix = (
            f"its forward raises {name} while it is traced{at}: {first}",
            "correct the model's forward, or inputs=",
        )
    return ExportError(f"{kind} cannot be exported: {why}. Fix: {fix}")


def _place(error: Exception) -> str:
    """The last line of a model's code that was running, as `` at FILE:LINE in FUNCTION``."""
    inside = (Path(torch.__file__).parent, Path(__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in inside)
    ]
    if not frames or Path(frames[-1].filename).name == "bundle.py":
        return ""
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}"
