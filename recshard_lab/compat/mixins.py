"""TorchRec's mixins for modules with a cache, and for modules that decide how they are copied to a device."""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

import torch
from torch import nn


class CacheMixin:
    """A module that stores results and can forget them."""

    @abstractmethod
    def clear_cache(self) -> None:
        """Forgets the stored results."""


class CopyMixIn:
    """A module that decides how ``DistributedModelParallel.copy`` treats it."""

    @abstractmethod
    def copy(self, device: torch.device) -> nn.Module:
        """This module on a device."""


class ModuleCopyMixin(CopyMixIn):
    """A module that ``copy`` moves with ``to``.

    >>> class Layer(ModuleCopyMixin, nn.Linear):
    ...     pass
    >>> Layer(2, 1).copy(torch.device("meta")).weight.device
    device(type='meta')
    """

    def copy(self, device: torch.device) -> nn.Module:
        """This module, moved to the device."""
        return cast(nn.Module, self).to(device)


class ModuleNoCopyMixin(CopyMixIn):
    """A module that ``copy`` leaves where it is."""

    def copy(self, device: torch.device) -> nn.Module:
        """This module, unchanged."""
        return cast(nn.Module, self)
