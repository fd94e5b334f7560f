"""The cost model: what shards cost their ranks, and the predicted step of a plan.

Read `loads.py` (what is counted per shard), `cost.py` (milliseconds and bytes from it), `estimate.py` (a whole plan),
then `terms.py` (the same costs as linear terms, for the search). `torchrec_cost.py` has TorchRec's own formulas.
"""
