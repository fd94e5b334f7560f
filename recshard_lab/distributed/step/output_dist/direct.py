"""``direct``: one all-to-all of partial rows, added by the rank that receives them."""

import numpy as np
from torch import Tensor

from recshard_lab.comm import QuantizedCommCodecs, ShardingEnv
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.output_dist.base import OutputPath, Target, runs_of, widths_of
from recshard_lab.distributed.step.output_dist.columns import ColumnMap, Ints
from recshard_lab.distributed.step.output_dist.kernel_orders import Stacked
from recshard_lab.distributed.step.output_dist.replica_gradients import Replicas
from recshard_lab.distributed.step.output_dist.wire import Arriving, Exchange
from recshard_lab.distributed.step.types import LookupInput


class DirectPath(OutputPath):
    """Rank k sends ``[B, D_k]`` to the rank of each local batch; of a variable batch, a parcel of each shard feature.

    Replicas send nothing forward. Backward, their gradients go to every rank, behind the columns of the exchanged
    shards (`Replicas`), so that all replicas take the same step.

    Args:
        layout: the wiring.
        env: the ranks.
        codecs: number formats of both directions.
        target: the output. In that of a variable batch, this path serves the shard features of all paths.
    """

    name = "direct"

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs, target: Target) -> None:
        features = layout.exchanged_features if target.variable else layout.features_of(self.name)
        super().__init__(layout, env, codecs, features)
        self.target, keep = target, 1 if target.variable else 8
        areas = [[[one] for one in own] if target.variable else [own] for own in features]
        every = [area for own in areas for area in own]
        self.area_widths = [sum(widths_of(area)) for area in every]
        self.runs = [run for number, area in enumerate(every) for run in runs_of(area, number, target.places)]
        self._receivers = np.array([target.places[area[0].block][0] if area else 0 for area in every], dtype=np.int64)
        self.split = ColumnMap([run.reversed() for run in self.runs], target.widths, self.area_widths, keep=keep)
        own = [sum(widths_of(area)) for area in areas[env.rank]]
        self.replicas = Replicas(layout, env.world_size, target, own)
        self.order = Stacked(own, env.world_size, self.replicas.widths)
        parcels = [[widths_of(area) for area in stored] for stored in areas]
        self.exchange = Exchange(parcels, env, codecs, self.replicas.widths)

    def begin(self, rows: Tensor, lookup_input: LookupInput) -> Arriving:
        if not any(self.area_widths):  # every table is replicated: on all ranks alike
            return Arriving.nothing(rows)
        bags = _bags(lookup_input)
        return self.exchange.send(self.order.by_source(rows, bags), bags, self.area_rows(lookup_input))

    def area_rows(self, lookup_input: LookupInput) -> Ints:
        return np.array(self.target.rows(lookup_input.local_batch))[self._receivers]

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> Arriving:
        if not any(self.area_widths) and not self.replicas.features:
            return Arriving.nothing(grad)
        batch, rows, counts = lookup_input.local_batch, self.area_rows(lookup_input), _bags(lookup_input)
        message = self.split(grad.view(-1), self.target.rows(batch), rows, scale)
        sends = self.replicas.sends(batch)
        if sends:
            message = self.exchange.with_tails(message, rows, self.replicas.gradients(grad.view(-1), scale, batch))
            counts = np.hstack([counts, lookup_input.copy_bags])
        return self.exchange.send_back(message, rows, counts, sends)

    def finish_backward(self, begun: Arriving, lookup_input: LookupInput) -> tuple[Tensor, ...]:
        received, bags = begun.wait(), _bags(lookup_input)
        if not self.replicas.features:
            return (self.order.by_kernel(received, bags),)
        own, tails = self.exchange.begins(np.hstack([bags, lookup_input.copy_bags]))
        copies = self.replicas.order.by_kernel(received, lookup_input.copy_bags, tails)
        return self.order.by_kernel(received, bags, own), copies


def _bags(lookup_input: LookupInput) -> Ints:
    """``[W, parcels]``: rows of each parcel for each rank."""
    return np.array(lookup_input.segments)[:, None] if lookup_input.bags is None else lookup_input.bags
