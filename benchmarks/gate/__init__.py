"""The gate of the promised figures: missed targets and slower code fail a CI run.

``python -m benchmarks.gate check`` measures every benchmark of `GATED` once and compares each figure that has a
target. A benchmark with a missed figure is measured two more times. The median of three decides, and all tries are
written to a JSON file.

``record`` measures benchmarks several times and keeps the medians in a file that is committed. From it, ``docs``
writes the tables of docs/benchmarks.md and of the README.
"""

GATED = ("launch", "launch_kernel", "launch_cycles", "import_time", "plan", "compare")
"""The benchmarks that every CI run measures."""

IN_DOCS = (*GATED[:-1], "compare", "construct", "reshard", "published")
"""The benchmarks in the table of docs/benchmarks.md, in its order."""

IN_README = {
    "training steps per second, row_wise with SGD, as a multiple of TorchRec's": (
        "train_step",
        "row_wise, SGD, uniform",
        "--with-torchrec",
    ),
    "planning of 100 tables on 8 ranks": ("plan", "plan of 100 tables x 8 ranks", ""),
    "launch of 4 ranks to their first all_reduce, warm": ("launch", "launch of 4 ranks to first all_reduce, warm", ""),
    "interrupt of a hung collective to a usable prompt, 4 ranks": (
        "launch_kernel",
        "a stuck collective interrupted to a usable prompt, 4 ranks",
        "",
    ),
    "mean error of predicted steps, beside all 35 published steps on GPUs": (
        "published",
        "predicted against published step times, mean error, all steps",
        "",
    ),
    "the same, beside the 21 of them without TensorFlow's sparse Adagrad": (
        "published",
        "predicted against published step times, mean error, fused kernels",
        "",
    ),
}
"""The README's figures, in its words -> benchmark, figure, and options of the command."""
