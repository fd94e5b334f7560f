"""Prepares what the first cell of a notebook needs: compiled loops, and libraries in the page cache.

It runs when the image is built and again when a container starts. The container may have another processor: then the
loops are compiled again (about 5 s). Torch is not in its page cache yet. MovieLens is not downloaded here, because
GroupLens does not allow its redistribution. The notebook downloads it for its reader.
"""

from importlib import import_module

from recshard_lab.embedding.kernels.numba.compiled import why_absent
from recshard_lab.launcher.engines.fork import LATER

for name in (*LATER, "recshard_lab.lab.widgets", "plotly.graph_objects"):
    import_module(name)
absent = why_absent()
if absent:
    raise SystemExit(f"lookups will run without the compiled loops: {absent}")
