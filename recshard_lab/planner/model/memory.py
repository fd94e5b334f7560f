"""Bytes of memory that a plan needs on each rank, by category.

The executor measures the same categories: weights, optimizer state (with gradients for kernel "dense"), the index of
dynamic tables, the dense layers, buffers of received ids, and buffers of sent and received rows. The reserve
(`Topology.reserve_fraction`) lowers the usable limit, so it has no category. In loads the index is part of the state.
"""

import numpy as np

from recshard_lab.planner.workload import OPTIMIZER_STATE_BYTES, Array, TableLoads, Workload

MEMORY_CATEGORIES = ("weights", "optimizer_state", "dense", "input_buffers", "output_buffers")
INDEX = "index"  # a category more, where there are dynamic tables


def rect_memory(
    tables: TableLoads,
    of: Array,
    rows: Array,
    cols: Array,
    dense: Array,
    world_size: int,
    optimizer: str,
    arrives: tuple[Array, Array, Array],
) -> tuple[Array, Array, Array, Array]:
    """Bytes of weights, optimizer state, input and output buffers that each of n shards puts on its rank.

    Args:
        of: ``[n]`` table of each shard (positions in `tables`).
        rows, cols: ``[n]`` its sizes.
        dense: ``[n]`` 1.0 if the kernel keeps a gradient of the whole shard.
        arrives: three arrays ``[n]``, per source rank: ids, vectors (rows sent, or gradients received), and lengths of
            bags. For replicas they count bags or touched rows, as `CostModel` does.
    """
    per_row, per_element = OPTIMIZER_STATE_BYTES[optimizer]
    elements = rows * cols
    weights = elements * tables.element_bytes[of]
    state = rows * (per_row + tables.index_bytes[of]) + elements * (per_element + 4 * dense)
    ids, vectors, lengths = (world_size * each for each in arrives)
    received = tables.id_bytes[of] * (ids + lengths) + 4 * ids * tables.weighted[of]  # fp32 weights
    return weights, state, received, 4 * vectors * cols  # fp32 rows; in backward their gradients instead


def fixed_memory(tables: TableLoads, workload: Workload) -> Array:
    """Bytes per category ``[5]`` that every rank needs under every plan."""
    vectors = tables.pooled * tables.bags + (1 - tables.pooled) * tables.ids
    joined = 4 * float((vectors * tables.cols).sum())  # the joined output
    dense = workload.dense_parameters * workload.dense_bytes_per_parameter
    return np.array([0.0, 0.0, dense, 0.0, joined])
