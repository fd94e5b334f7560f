"""Random work against a model of what must be true after it. Everything random follows from a seed.

RECSHARD_FUZZ=SECONDS is the length of the long run; without it, only fixed seeds run. RECSHARD_FUZZ_FROM is the first
seed of a long run.
"""
