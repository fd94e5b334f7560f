"""Inference with tables that are split over devices, by the same plans as training.

Read `shard` (what users call), then `sources` (where rows come from), `devices` (who computes), `tiles` (one
collection on devices of this process), `capture` (the same at fixed shapes, for CUDA graphs) and `ranks` (one
collection over launched ranks).
"""

from recshard_lab.serving.inference.capture import CapturedInference as CapturedInference
from recshard_lab.serving.inference.devices import DeviceMemory as DeviceMemory
from recshard_lab.serving.inference.shard import ShardedInference as ShardedInference
from recshard_lab.serving.inference.shard import shard_for_inference as shard_for_inference
