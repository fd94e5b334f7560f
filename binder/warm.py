"""What the first cell of a notebook would wait for: compiled loops, and libraries that lie on a cold disk.

Run when the image is built, and again when a container starts: that may be on another processor, for which the loops
are compiled anew (some 5 s), and with nothing of torch in memory yet. MovieLens is not fetched here: GroupLens does not
allow its ratings to be passed on, in an image neither; the notebook fetches them for its reader.
"""

from importlib import import_module

from recshard_lab.embedding.kernels.numba.compiled import why_absent
from recshard_lab.launcher.engines.fork import LATER

for name in (*LATER, "recshard_lab.lab.widgets", "plotly.graph_objects"):
    import_module(name)
absent = why_absent()
if absent:
    raise SystemExit(f"lookups will run without the compiled loops: {absent}")
