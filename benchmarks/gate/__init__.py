"""The gate of the promised figures: missed targets and slower code fail a CI run.

``python -m benchmarks.gate check`` measures every benchmark of `GATED` once and compares each figure that has a
target. A benchmark with a missed figure is measured two more times. The median of three decides, and all tries are
written to a JSON file.

``record`` measures benchmarks several times and keeps the medians in a file that is committed. From it, ``readme``
writes the tables of the README.
"""

GATED = ("launch", "launch_kernel", "launch_cycles", "import_time", "plan", "compare")
"""The benchmarks that every CI run measures."""

IN_README = (*GATED[:-1], "compare", "construct", "reshard", "published")
"""The benchmarks in the README's table of figures, in its order."""
