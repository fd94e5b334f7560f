"""What a plan is: every table as shards, rectangles of rows x columns on ranks.

In walking order: `tiling` (rectangles), `types` (shards and names), `validate`, `cache_params`, `parameter_sharding`
(one table),
`sharding_plan` (a model), `plan_json` (its file format), `transfers` (from one plan to another), `row_shares` and
`constraints` (what you require of a table's plan).
"""
