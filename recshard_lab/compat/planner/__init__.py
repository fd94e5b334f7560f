"""TorchRec's planner and its parts: real objects that a user's own parts replace.

In walking order: `constants`, `costs` (Perf, Storage, errors), `topology` and `topology_configs`, `options`,
`constraints`, `cache`, `base` (abstract parts), `estimators`, `enumerators`, `proposers`, `offload`, `partitioners`,
`perf_models`, `reservations`, `stats`, `plans` (options to plans, checks), `planners`, and `utils` and `hashes`.
"""
