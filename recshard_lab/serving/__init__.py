"""Serving: bundles that answer without this library, and what loads and serves them."""

from recshard_lab.serving.bundle import Batch as Batch
from recshard_lab.serving.bundle import BundleError as BundleError
from recshard_lab.serving.bundle import Inputs as Inputs
from recshard_lab.serving.bundle import Servable as Servable
from recshard_lab.serving.bundle import SparseInput as SparseInput
from recshard_lab.serving.bundle import load_bundle as load_bundle
from recshard_lab.serving.bundle import save_bundle as save_bundle
from recshard_lab.serving.bundle import split_answers as split_answers
from recshard_lab.serving.export.refusals import ExportError as ExportError

__all__ = [
    "Batch",
    "BundleError",
    "ExportError",
    "Inputs",
    "Servable",
    "SparseInput",
    "load_bundle",
    "save_bundle",
    "split_answers",
]
