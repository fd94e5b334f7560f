"""Adapters of ``torchrec.distributed``: what only code written for TorchRec needs.

In reading order: `types`, `sharded_module`, `model_parallel`, `embedding_types`, `utils`, `comm`, `codecs`,
`shard_sizes`.
"""
