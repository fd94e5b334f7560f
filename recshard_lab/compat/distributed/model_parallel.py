"""``torchrec.distributed.model_parallel``: the modules inside wrappers."""

from __future__ import annotations

from torch import nn

from recshard_lab.distributed import DistributedModelParallel


def get_module(module: nn.Module) -> nn.Module:
    """The module inside `DistributedModelParallel`, with the wrapper that replicates its dense part."""
    while isinstance(module, DistributedModelParallel):
        module = module._dmp_wrapped_module
    return module


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """The module inside `DistributedModelParallel`, DistributedDataParallel and FSDP."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    while True:
        if isinstance(module, DistributedModelParallel):
            module = module._dmp_wrapped_module
        elif isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            module = module.module
        else:
            return module
