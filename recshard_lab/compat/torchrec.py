"""``import torchrec`` where TorchRec is not: its names, answered by this library.

>>> install(shadow=True)
>>> import torchrec
>>> torchrec.KeyedJaggedTensor
<class 'recshard_lab.sparse.keyed_jagged_tensor.KeyedJaggedTensor'>
>>> uninstall()

What a tutorial says about the machine (``"nccl"``, ``"cuda"``) is put right by `translated`, or by hand with `backend`
and `device`.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from recshard_lab.compat.serving import ROOT, Finder, finder_in_place
from recshard_lab.compat.translate import backend as backend
from recshard_lab.compat.translate import device as device
from recshard_lab.compat.translate import translated as translated

__all__ = ["backend", "device", "install", "installed", "translated", "uninstall"]

FOR_CHILDREN = "RECSHARD_TORCHREC"
"""Set in the environment while names are served: processes started from here serve them as well."""


def install(shadow: bool = False) -> None:
    """Answers ``import torchrec`` and its submodules from now on, here and in processes started from here.

    A name that this library does not have is refused where it is imported, with what it was for and what comes nearest.
    Calling it again changes nothing.

    Args:
        shadow: serve the names though a TorchRec is installed, which then cannot be imported.

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
            "torchrec has been imported already, and its objects are in use: call install() in a fresh interpreter, "
            "before anything imports torchrec"
        )
    there = find_spec(ROOT)
    if there is not None and not shadow:
        raise ImportError(
            f"torchrec is installed here ({there.origin}): import it as it is, or call install(shadow=True) to have "
            f"its names answered by recshard_lab instead"
        )
    sys.meta_path.insert(0, Finder())
    os.environ[FOR_CHILDREN] = "shadow" if shadow else "install"


def install_as_parent() -> None:
    """What the process that started this one has installed; a process with a TorchRec of its own keeps that."""
    shadow = os.environ.get(FOR_CHILDREN) == "shadow"
    if ROOT not in sys.modules and (shadow or find_spec(ROOT) is None):
        install(shadow)


def uninstall() -> None:
    """Takes the names away again; objects made through them live on. Without `install` it does nothing."""
    finder = finder_in_place()
    if finder is None:
        return
    sys.meta_path.remove(finder)
    os.environ.pop(FOR_CHILDREN, None)
    for name in [name for name in sys.modules if name == ROOT or name.startswith(f"{ROOT}.")]:
        del sys.modules[name]


def installed() -> bool:
    """Whether TorchRec's names are served now."""
    return finder_in_place() is not None
