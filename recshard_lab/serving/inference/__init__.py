"""Inference with tables that are split over devices, by the same plans as training.

Read `shard` (what users call), then `sources` (where rows come from), `devices` (who computes), `tiles` (one
collection on devices of this process), `capture` (the same at fixed shapes, for CUDA graphs), `ranks` (one
collection over launched ranks) and `latency` (the planner's prediction beside the measured time).
"""

from recshard_lab.serving.inference.capture import CapturedInference as CapturedInference
from recshard_lab.serving.inference.devices import DeviceMemory as DeviceMemory
from recshard_lab.serving.inference.latency import LatencyTable as LatencyTable
from recshard_lab.serving.inference.latency import PlanLatency as PlanLatency
from recshard_lab.serving.inference.latency import compare_latencies as compare_latencies
from recshard_lab.serving.inference.latency import measure_devices as measure_devices
from recshard_lab.serving.inference.shard import ShardedInference as ShardedInference
from recshard_lab.serving.inference.shard import shard_for_inference as shard_for_inference
