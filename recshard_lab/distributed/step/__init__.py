"""One step of a sharded collection: ids to the ranks that store their rows, lookup, rows back to the source ranks.

In walking order:

- `batch`: the terms of a step, the ids of a batch on their way, and the one read of the device (`read_all`).
- `layout`: which rank gets which ids, and where returned columns belong. Fixed by the plan.
- `program`: `Step`, one batch under way, and its stages as lists of calls, which a plan and the form of a batch fix.
- `executor`: runs these lists, and drains them after an error. Two autograd nodes.
- `input_dist`: packs and sends ids, after one message of all that hosts must know. `route` finds the ids of each shard
  feature.
- `lookup`: the kernels of this rank. `kernels`: their calls in a step.
- `output_dist`: the output paths: return rows, and gradients in backward, in `messages` whose columns `columns` places.
  `replicas` has what replicated tables exchange.
- `gradients`: norms of rows over column shards, deferred steps, gradients of per-sample weights.
"""
