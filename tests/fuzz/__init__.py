"""Random work against a model of what must be true after it. Everything random follows from a seed.

RECSHARD_FUZZ=SECONDS is the length of the long run; without it, only fixed seeds run. RECSHARD_FUZZ_FROM is the first
seed of a long run.

Models and plans (`test_models.py`) are compared with plain ``torch.nn`` modules and hand-written optimizers. Every case
is a number: tables, number formats, optimizer, codecs, kernels, host memory, partial replicas, uneven tilings, batches
as views of every stride, and two live reshards follow from it::

    python -m pytest tests/fuzz/test_models.py                              fixed cases
    RECSHARD_FUZZ=600 python -m pytest tests/fuzz/test_models.py -s         600 s of others, shared by 1 to 4 ranks
    python -m tests.fuzz WORLD_SIZE NUMBER                                  one case; a failing test prints this command

Tolerances are not chosen by hand. The reference runs in float64, and again several times with an error at every place
where the library rounds, as large as that rounding can be, with random signs. A result may be `compare.FACTOR` times as
far from the reference as the farthest of these runs. See `reference.py` for the bound of each rounding.
"""
