"""What ranks store between steps, and how it moves.

In walking order: `parts` (the tensors of a table), `forms` (a table in state dicts), `moves` (from one tiling to
another), `live_reshard` with `dense_tables` and `regroup`, `replica_sync`, `model_state`, `checkpoint/`,
`pretrained`.
"""
