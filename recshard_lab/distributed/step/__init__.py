"""One step of a sharded collection: ids to the ranks that store their rows, lookup, rows back to the source ranks.

In walking order:

- `types`: what the stages pass to each other.
- `layout`: which rank gets which ids, and where returned columns belong. Fixed by the plan.
- `executor`: the step itself, and its two autograd nodes.
- `input_dist`: sends ids. It uses `check_ids` (ids out of range), `route_ids` with `bucketize` (ids of each shard
  feature), `touched_rows` (distinct rows), `segments` (where its ids are), `host_read` (the one read of the device)
  and `sizes` (the message of all that hosts must know).
- `lookup`: the kernels of this rank; `row_norms` adds squares over column shards.
- `output_dist/`: returns rows, and gradients in backward; `weight_gradients` returns those of per-sample weights.
"""
