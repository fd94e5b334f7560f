"""``torchrec.metrics``: metrics that users extend by computations with named states.

`recshard_lab.train.metrics` has the library's own metrics, whose results do not depend on the order of equal scores.

In reading order: `names`, `config`, `rec_metric` (the base classes), `sums`, `means`, `entropies`, `classes`, `order`
and `curves` (the metrics), `throughput`, `tower_qps`, `module`.
"""
