"""Serving: bundles that answer without this library, and what loads and serves them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recshard_lab.serving.bundle import Batch as Batch
from recshard_lab.serving.bundle import BundleError as BundleError
from recshard_lab.serving.bundle import Inputs as Inputs
from recshard_lab.serving.bundle import Servable as Servable
from recshard_lab.serving.bundle import SparseInput as SparseInput
from recshard_lab.serving.bundle import load_bundle as load_bundle
from recshard_lab.serving.bundle import save_bundle as save_bundle
from recshard_lab.serving.bundle import split_answers as split_answers
from recshard_lab.serving.export.refusals import ExportError as ExportError

if TYPE_CHECKING:
    from recshard_lab.serving.server import Client as Client
    from recshard_lab.serving.server import ServeError as ServeError
    from recshard_lab.serving.server import serve as serve

__all__ = [
    "Batch",
    "BundleError",
    "Client",
    "ExportError",
    "Inputs",
    "Servable",
    "ServeError",
    "SparseInput",
    "load_bundle",
    "save_bundle",
    "serve",
    "split_answers",
]


def __getattr__(name: str) -> Any:
    if name in ("Client", "ServeError", "serve"):  # imported when used: `serve` needs the extra "serving"
        return getattr(import_module("recshard_lab.serving.server"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
