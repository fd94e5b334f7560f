"""Switches that reduce the launches of a step, for batches so small that starting kernels costs more than running them.

The changes that NVIDIA's MLPerf submissions of DLRM-DCNv2 name for their step of 7.68, then 3.4 ms, and the switch of
each:

================================  ==========================================================================
fewer and cheaper launches        ``batch_tables=`` of the sharders (one lookup for all tables),
                                  ``fuse_exchanges=`` of the pipelines (one message for all collections),
                                  `compile_dense` (torch.compile of the dense part)
CUDA graphs                       `graph_dense`; needs a GPU
input_dist in a separate thread   ``threads=`` of the pipelines
pinned host memory                ``pin_memory=`` of the pipelines; needs a GPU
================================  ==========================================================================

``recshard bench train`` measures those that this machine can run, over local batch sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss

from recshard_lab.distributed import DistributedModelParallel, ShardedCollection


def dense_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The largest parts of a model without a sharded collection inside, except losses.

    Args:
        model: sharded or unsharded, with or without wrappers.

    >>> model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    >>> list(dense_modules(model))
    ['']
    """
    return dict(_dense(_bare(model), ""))


def _dense(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, ShardedCollection | _Loss):
        return
    if not any(isinstance(part, ShardedCollection) for part in module.modules()):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _dense(child, f"{path}.{name}" if path else name)


def compile_dense(model: nn.Module, **options: Any) -> list[str]:
    """Compiles the dense parts in place with torch.compile, each at its first call.

    Sharded collections stay uncompiled: their exchanges cannot be compiled, and their kernels are compiled already.
    Results may differ from the uncompiled model's by rounding.

    Args:
        model: sharded, before or after it is replicated.
        options: of ``torch.nn.Module.compile``: ``backend=``, ``mode=``, ``dynamic=``, ``fullgraph=``.

    Returns:
        The paths of the compiled modules.

    Raises:
        ValueError: the model has no dense part, or is not a module.

    >>> compile_dense(nn.Linear(2, 1), backend="eager")
    ['']
    """
    found = _some_dense(model)
    for module in found.values():
        module.compile(**options)
    return list(found)


def graph_dense(model: nn.Module, batch: Any, warm_up: int = 3) -> list[str]:
    """Records the forward and backward of the dense parts as CUDA graphs, each then one launch. Needs a GPU.

    Every later batch must have the shapes of ``batch``. Gradients are stored as before. Record the graphs before the
    model is replicated: make it with ``init_data_parallel=False``, and call ``model.init_data_parallel()`` afterwards.
    DDP's all-reduce is launched between the graphs.

    Args:
        model: sharded, on a GPU, called with a batch, and not replicated yet.
        batch: on the GPU; it runs through the model once, without a step.
        warm_up: runs before the recording.

    Returns:
        The paths of the recorded modules.

    Raises:
        ValueError: no GPU, a model that is elsewhere, is replicated already or has no dense part.
    """
    found = _some_dense(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if not torch.cuda.is_available() or device.type != "cuda":
        where = f"the model is on {device}" if torch.cuda.is_available() else "this machine has none"
        raise ValueError(f"graph_dense needs an NVIDIA GPU, and {where}: leave it out, or use compile_dense(model)")
    if any(isinstance(part, nn.parallel.DistributedDataParallel) for part in model.modules()):
        raise ValueError(
            "the dense part is replicated already, and graphs must come first: make the model with "
            "DistributedModelParallel(..., init_data_parallel=False), graph it, then call model.init_data_parallel()"
        )
    samples = _samples(model, found, batch)
    paths = [path for path in found if path in samples]
    graphed = torch.cuda.make_graphed_callables(
        tuple(found[path] for path in paths), tuple(samples[path] for path in paths), num_warmup_iters=warm_up
    )
    assert len(graphed) == len(paths)
    return paths


def _samples(model: nn.Module, found: dict[str, nn.Module], batch: Any) -> dict[str, tuple[torch.Tensor, ...]]:
    """What each part is called with; parts that are called with anything but tensors are left out."""
    samples: dict[str, tuple[torch.Tensor, ...]] = {}

    def remember(path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and all(isinstance(arg, torch.Tensor) for arg in args):
                samples[path] = tuple(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args)

        return hook

    handles = [module.register_forward_pre_hook(remember(path)) for path, module in found.items()]
    try:
        with torch.enable_grad():
            model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return samples


def _some_dense(model: nn.Module) -> dict[str, nn.Module]:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {model!r:.80}")
    found = dense_modules(model)
    if not found:
        raise ValueError("the model has no dense part: nothing but sharded collections")
    return found


def _bare(model: nn.Module) -> nn.Module:
    while isinstance(model, DistributedModelParallel | nn.parallel.DistributedDataParallel):
        model = model._dmp_wrapped_module if isinstance(model, DistributedModelParallel) else model.module
    return model
