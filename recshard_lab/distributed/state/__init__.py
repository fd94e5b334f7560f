"""What ranks store between steps, and how it moves.

In walking order: `table` (the tensors of a table, and its shards), `forms` (a table in state dicts), `moves` (from one
tiling to another), `reshard`, `replica_sync`, `model_state`, `checkpoint`, `pretrained`, `dumps` (rows of dynamic
tables).
"""
