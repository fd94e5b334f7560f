"""The dense part of DLRM-DCNv2 by formula: parameters, arithmetic and launches of a step, from its layer sizes alone.

A linear layer of I inputs and O outputs takes 2 I O operations a sample forward, as many for the gradient of its weight
and as many for that of its input. A low-rank cross layer of width d and rank r is two linear layers, d x r and r x d,
a multiplication and an addition. Launches are those that torch dispatches, one a matrix product, activation, sum of a
bias' gradient, or sum of two gradients (`recshard bench mlperf-launches` counts them on the real modules).
"""

from dataclasses import dataclass
from itertools import pairwise

from recshard_lab import mlperf

BUCKET_BYTES = 25 * 2**20  # torch's DistributedDataParallel, by default


@dataclass(frozen=True)
class DenseCost:
    """Of one step.

    Attributes:
        parameters: in all.
        forward_flops, backward_flops: of one sample.
        tensors: of parameters: weights and biases.
    """

    parameters: int
    forward_flops: int
    backward_flops: int
    tensors: int


def dlrm_dcn_dense() -> DenseCost:
    """The benchmark's bottom MLP, cross network and top MLP.

    >>> cost = dlrm_dcn_dense()
    >>> f"{cost.parameters:,}", f"{(cost.forward_flops + cost.backward_flops) / 1e6:.1f} MFLOP a sample"
    ('16,044,545', '96.3 MFLOP a sample')
    """
    width = (len(mlperf.ROWS) + 1) * mlperf.EMBEDDING_DIM
    bottom = list(pairwise((mlperf.DENSE_FEATURES, *mlperf.DENSE_ARCH_LAYERS)))
    top = list(pairwise((width, *mlperf.OVER_ARCH_LAYERS)))
    cross = [(width, mlperf.DCN_LOW_RANK), (mlperf.DCN_LOW_RANK, width)] * mlperf.DCN_LAYERS
    products = sum(i * o for i, o in (*bottom, *top, *cross))
    biases = sum(o for _, o in (*bottom, *top)) + mlperf.DCN_LAYERS * width
    elementwise = mlperf.DCN_LAYERS * 2 * width
    first = bottom[0][0] * bottom[0][1]  # nobody asks for the gradient of the data
    return DenseCost(
        parameters=products + biases,
        forward_flops=2 * products + biases + elementwise,
        backward_flops=4 * products - 2 * first + biases + 2 * elementwise,
        tensors=2 * (len(bottom) + len(top)) + 3 * mlperf.DCN_LAYERS,
    )


def dlrm_dcn_launches() -> dict[str, int]:
    """Launches of the dense part in a step, by part; what torch's DistributedDataParallel adds is ``all_reduce``.

    >>> dlrm_dcn_launches()["forward"]
    26
    """
    bottom, top, cross = len(mlperf.DENSE_ARCH_LAYERS), len(mlperf.OVER_ARCH_LAYERS), mlperf.DCN_LAYERS
    relus = bottom + top - 1
    cost = dlrm_dcn_dense()
    buckets = -(-4 * cost.parameters // BUCKET_BYTES)
    loss = 5  # ones, sigmoid, difference, product, mean
    return {
        # linear layers, their activations, two products and a fused multiply-add a cross layer, cat, loss
        "forward": bottom + top + relus + 3 * cross + 2,
        # dW, dx, db a linear layer (no dx at the first); a cross layer: dW, dx twice, db, four products of the
        # multiply-add and two sums of gradients that meet, one more at the end
        "backward": 3 * (bottom + top) - 1 + relus + (5 + 4 + 2) * cross + 1 + loss,
        "optimizer": 6,  # foreach operators over all tensors
        "all_reduce": 2 * cost.tensors + buckets,  # every gradient into its bucket and back, one collective a bucket
    }
