"""What a plan is written as for people and other programs: `text_table` and `script` (for torchrun).

Its file format is `recshard_lab.sharding.plan.plan_json`.
"""
