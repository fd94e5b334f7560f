"""``import torchrec`` without TorchRec: this library's classes under its names.

>>> install(shadow=True)
>>> import torchrec
>>> torchrec.KeyedJaggedTensor
<class 'recshard_lab.sparse.keyed_jagged_tensor.KeyedJaggedTensor'>
>>> uninstall()

`translated` replaces ``"nccl"`` and ``"cuda"`` in the text of a tutorial on a machine without GPUs. `backend` and
`device` return the right values for a script.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from recshard_lab.arguments import checks_arguments
from recshard_lab.compat.serving import ROOT, Finder, finder_in_place
from recshard_lab.compat.translate import backend as backend
from recshard_lab.compat.translate import device as device
from recshard_lab.compat.translate import translated as translated
from recshard_lab.sparse import checks

__all__ = ["backend", "device", "install", "installed", "translated", "uninstall"]

FOR_CHILDREN = "RECSHARD_TORCHREC"
"""Environment variable that is set while names are served: child processes serve them too."""


@checks_arguments
def install(shadow: bool = False) -> None:
    """Answers ``import torchrec`` and its submodules with this library's classes, also in child processes.

    The import of a name that this library does not have raises ImportError with its purpose and the nearest name here.
    Until `uninstall`, constructors of jagged tensors accept values beyond the sum of the lengths, and leave them out.
    A second call has no effect.

    Args:
        shadow: whether to serve the names although TorchRec is installed. TorchRec then cannot be imported.

    Raises:
        ImportError: TorchRec is installed and `shadow` is False, or it has been imported already.

    >>> install(shadow=True); install(); installed()
    True
    >>> uninstall(); installed()
    False
    """
    if installed():
        return
    if ROOT in sys.modules:
        raise ImportError(
            "torchrec has been imported already, and its objects are in use. Fix: call install() in a fresh "
            "interpreter, before the first import of torchrec"
        )
    there = find_spec(ROOT)
    if there is not None and not shadow:
        raise ImportError(
            f"torchrec is installed here ({there.origin}), and install() does not replace it. Fix: import torchrec "
            f"without install(), or call install(shadow=True) to import recshard_lab's classes instead"
        )
    sys.meta_path.insert(0, Finder())
    checks.LEAVE_OUT_SPARE_VALUES = True
    os.environ[FOR_CHILDREN] = "shadow" if shadow else "install"


def install_as_parent() -> None:
    """Serves the names if the parent process does. A child process in which TorchRec is installed imports TorchRec."""
    shadow = os.environ.get(FOR_CHILDREN) == "shadow"
    if ROOT not in sys.modules and (shadow or find_spec(ROOT) is None):
        install(shadow)


def uninstall() -> None:
    """Stops serving the names. Existing objects stay valid. Without `install` it has no effect."""
    finder = finder_in_place()
    if finder is None:
        return
    sys.meta_path.remove(finder)
    checks.LEAVE_OUT_SPARE_VALUES = False
    os.environ.pop(FOR_CHILDREN, None)
    for name in [name for name in sys.modules if name == ROOT or name.startswith(f"{ROOT}.")]:
        del sys.modules[name]


def installed() -> bool:
    """Whether TorchRec's names are served."""
    return finder_in_place() is not None
