"""How many collectives a step takes: counted on four ranks of two virtual nodes, beside what was counted by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import collectives
from benchmarks.apparatus.step_case import ROWWISE
from recshard_lab import launch
from recshard_lab.sharding import scheme_names

pytestmark = pytest.mark.gate

PLAIN = Counter(all_to_all=4)
ADDED_ON_THE_WAY = Counter(all_to_all=2, reduce_scatter=1, all_gather=1)
HOPS = Counter(all_to_all=6)
#: scheme -> what a step of a full batch takes by each route
BY_HAND = {
    "table_wise": {"direct": PLAIN, "reduce_scatter": PLAIN, "two_hop": HOPS},
    "row_wise": {"direct": PLAIN, "reduce_scatter": ADDED_ON_THE_WAY, "two_hop": HOPS},
    "column_wise": {"direct": PLAIN, "reduce_scatter": PLAIN, "two_hop": HOPS},
    "data_parallel": {"direct": Counter(all_to_all=3)},
    "table_row_wise": {"direct": PLAIN, "reduce_scatter": ADDED_ON_THE_WAY, "two_hop": HOPS},
    "table_column_wise": {"direct": PLAIN, "reduce_scatter": PLAIN, "two_hop": HOPS},
    "grid_shard": {"direct": PLAIN, "reduce_scatter": ADDED_ON_THE_WAY, "two_hop": HOPS},
    "flex_shard": {  # gradients of the replicas go directly
        "direct": PLAIN,
        "reduce_scatter": ADDED_ON_THE_WAY + Counter(all_to_all=1),
        "two_hop": HOPS + Counter(all_to_all=1),
    },
    "mixed": {
        "direct": PLAIN,
        "reduce_scatter": PLAIN + Counter(reduce_scatter=1, all_gather=1),
        "two_hop": HOPS + Counter(all_to_all=1),
    },
}
COLUMNS_CUT = ("column_wise", "table_column_wise", "grid_shard", "mixed")


def test_every_scheme_route_and_batch_takes_the_collectives_counted_by_hand() -> None:
    wanted = collectives.counted()
    assert {step.case.layout for step in wanted} == {*BY_HAND} >= {*scheme_names()}
    with launch(collectives.RANKS, nodes=collectives.NODES) as ranks:
        found = ranks.run(collectives.count, wanted)
    for step, *own in zip(wanted, *found, strict=True):
        layout = step.case.layout
        expected = BY_HAND[layout]["direct" if step.variable else step.route].copy()
        expected["all_to_all"] += step.case.optimizer == ROWWISE and layout in COLUMNS_CUT
        assert [count.kinds for count in own] == [expected] * collectives.RANKS, step.name
        assert step.most == expected.total(), step.name
        assert all(0 < count.across_nodes < count.sent for count in own), step.name
