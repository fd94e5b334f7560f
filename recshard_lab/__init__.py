"""Learn, explore and decide embedding sharding.

``__init__.pyi`` lists the public names: those typed most, and the rooms, which have the others. Each is imported on
first use. ``import recshard_lab`` imports no tensor library, and a rank never loads a widget.

>>> import recshard_lab as rs
>>> "KeyedJaggedTensor" in dir(rs), "sharding" in dir(rs)
(True, True)
"""

import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING

import lazy_loader as _lazy_loader

if _TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.2.0"

if "RECSHARD_TORCHREC" in _os.environ:  # the process that started this one serves TorchRec's names
    from recshard_lab.compat.torchrec import install_as_parent as _install_as_parent

    _install_as_parent()

__getattr__, _, _lazy = _lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*_lazy, "__version__", "load_ipython_extension", "unload_ipython_extension"])


def __dir__() -> list[str]:
    return list(__all__)


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """``%load_ext recshard_lab``: registers the magics and starts warming the ranks' forkserver."""
    from recshard_lab.lab.magics import load

    load(shell)


def unload_ipython_extension(shell: "InteractiveShell") -> None:
    """``%unload_ext recshard_lab``: stops the ranks and takes the magics away."""
    from recshard_lab.lab.magics import unload

    unload(shell)
