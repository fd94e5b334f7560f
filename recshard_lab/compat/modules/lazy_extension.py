"""``torchrec.modules.lazy_extension``: lazy modules with keyword arguments, and functions applied later.

torch's own lazy modules take keyword arguments too, so the mixin adds only the check of ``apply``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin


class LazyModuleExtensionMixin(LazyModuleMixin):
    """A lazy module whose first call passes its arguments to ``initialize_parameters``, keyword arguments too.

    >>> class Scale(LazyModuleExtensionMixin, nn.Module):
    ...     def __init__(self) -> None:
    ...         super().__init__()
    ...         self.weight = nn.UninitializedParameter()
    ...     def initialize_parameters(self, x, *, bias=None):
    ...         if self.has_uninitialized_params():
    ...             self.weight.materialize((x.shape[-1],))
    ...             nn.init.ones_(self.weight)
    ...     def forward(self, x, *, bias=None):
    ...         return x * self.weight + bias
    >>> import torch
    >>> Scale()(torch.ones(2), bias=torch.ones(2)).tolist()
    [2.0, 2.0]
    """

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Applies a function to this module and its submodules.

        Raises:
            RuntimeError: a module without its parameters yet. Call it once first, or use `lazy_apply`.
        """
        if self.has_uninitialized_params():  # type: ignore[misc]
            raise RuntimeError(
                f"{type(self).__name__} has no parameters yet, so a function cannot be applied. Fix: call the module "
                f"once, or use lazy_apply"
            )
        super().apply(fn)  # type: ignore[misc]
        return self


def lazy_apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """Applies a function to a module and its submodules once, right after the first forward.

    Args:
        module: lazy or not.
        fn: called with each submodule, then with `module`.

    Returns:
        `module`.

    >>> import torch
    >>> layer = lazy_apply(nn.LazyLinear(1), lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None)
    >>> layer(torch.ones(2, 3)).shape, layer.weight.tolist()
    (torch.Size([2, 1]), [[1.0, 1.0, 1.0]])
    """

    def after_first(called: nn.Module, *_: Any) -> None:
        handle.remove()
        called.apply(fn)

    handle = module.register_forward_hook(after_first)
    return module
