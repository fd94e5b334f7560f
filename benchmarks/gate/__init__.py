"""The gate of the promised figures: a missed one fails the gate.

``python -m benchmarks.gate check`` measures every benchmark of `GATED` once and judges each figure that has a target. A
time is judged in *reference steps*: how often a fixed piece of work could have run in it, measured beside it. So a slow
machine or a busy one misses no figure. Counts are judged as they are.

``record`` measures benchmarks several times and keeps the medians in a file that is committed. From it, ``docs``
writes the tables of docs/benchmarks.md and of the README.
"""

GATED = ("launch", "launch_kernel", "import_time", "plan")
"""The benchmarks that every run of ``.ci/run`` measures."""

NIGHTLY = ("launch_cycles", "compare")
"""The benchmarks that only ``.ci/night benchmarks`` measures."""

IN_DOCS = (
    *("launch", "launch_kernel", "launch_cycles", "import_time"),
    *("plan", "compare", "construct", "reshard", "published"),
)
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
