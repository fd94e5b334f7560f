"""What a plan needs in memory on each rank, per category.

The categories are those that the executor measures: weights, optimizer state (and gradients, where the kernel is
"dense"), the dense layers, buffers of ids that arrive, and buffers of rows that leave and return. The reserve
(`Topology.reserve_fraction`) is not held by anything, so it is no category: it lowers the usable limit instead.
"""

import numpy as np

from recshard_lab.planner.workload import OPTIMIZER_STATE_BYTES, Array, TableLoads, Workload

MEMORY_CATEGORIES = ("weights", "optimizer_state", "dense", "input_buffers", "output_buffers")


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
    """Bytes of weights, optimizer state, input and output buffers that each of n rectangles puts on its rank.

    Args:
        of: ``[n]`` table of each rectangle (positions in `tables`).
        rows, cols: ``[n]`` its sizes.
        dense: ``[n]`` 1.0 where the kernel keeps a gradient of the whole rectangle.
        arrives: ``[n]`` each, from every rank: ids, vectors (rows that leave, or gradients that come), and lengths of
            bags. Of replicas they are bags, or touched rows, as `CostModel` counts what is sent.
    """
    per_row, per_element = OPTIMIZER_STATE_BYTES[optimizer]
    elements = rows * cols
    weights = elements * tables.element_bytes[of]
    state = rows * per_row + elements * (per_element + 4 * dense)
    ids, vectors, lengths = (world_size * each for each in arrives)
    received = 4 * (ids * (1 + tables.weighted[of]) + lengths)  # int32 ids and lengths, fp32 weights
    return weights, state, received, 4 * vectors * cols  # fp32 rows; in backward their gradients instead


def fixed_memory(tables: TableLoads, workload: Workload) -> Array:
    """Bytes per category ``[5]`` that every rank needs whatever the plan is."""
    vectors = tables.pooled * tables.bags + (1 - tables.pooled) * tables.ids
    at_home = 4 * float((vectors * tables.cols).sum())  # the joined output
    dense = workload.dense_parameters * workload.dense_bytes_per_parameter
    return np.array([0.0, 0.0, dense, 0.0, at_home])
