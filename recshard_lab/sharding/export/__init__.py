"""A plan for readers and other programs: `plan_table`, and `script` for torchrun.

Its file format is `recshard_lab.sharding.plan.plan_json`.
"""
