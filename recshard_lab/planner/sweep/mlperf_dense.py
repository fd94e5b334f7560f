"""Parameters, operations and launches of DLRM-DCNv2's dense part, computed from its layer sizes.

A linear layer of I inputs and O outputs takes 2 I O operations per sample forward. The gradients of its weight and of
its input take as many each. A low-rank cross layer of width d and rank r is two linear layers, d x r and r x d, a
multiplication and an addition. torch launches one operator per matrix product, activation, sum of a bias' gradient and
sum of two gradients. `recshard bench mlperf-launches` counts them on the real modules.

Memory traffic is what these operators read and write of a sample's activations and gradients. Of a linear layer with
its activation, forward reads I and writes O, and the activation reads and writes O. Backward, the activation reads 2 O
and writes O, the gradient of the weight reads I + O, that of the input reads O and writes I, that of the bias reads O.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from recshard_lab import mlperf
from recshard_lab.planner.model.overlap import BUCKET_BYTES


@dataclass(frozen=True)
class DenseCost:
    """Of one step.

    Attributes:
        parameters: in all.
        forward_flops, backward_flops: of one sample.
        traffic: float32 numbers that are read and written for one sample, forward and backward.
        tensors: of parameters: weights and biases.
    """

    parameters: int
    forward_flops: int
    backward_flops: int
    traffic: int
    tensors: int


def linear_traffic(sizes: Sequence[int]) -> int:
    """Numbers that linear layers of these sizes, with activations, read and write for one sample.

    >>> linear_traffic([10, 4])
    66
    """
    return sum(3 * i + 9 * o for i, o in pairwise(sizes))


def dlrm_dcn_dense() -> DenseCost:
    """The benchmark's bottom MLP, cross network and top MLP.

    >>> cost = dlrm_dcn_dense()
    >>> f"{cost.parameters:,}", f"{(cost.forward_flops + cost.backward_flops) / 1e6:.1f} MFLOP a sample"
    ('16,044,545', '96.3 MFLOP a sample')
    >>> f"{4 * cost.traffic / 1e6:.1f} MB a sample"
    '1.4 MB a sample'
    """
    width = (len(mlperf.ROWS) + 1) * mlperf.EMBEDDING_DIM
    bottom = list(pairwise((mlperf.DENSE_FEATURES, *mlperf.DENSE_ARCH_LAYERS)))
    top = list(pairwise((width, *mlperf.OVER_ARCH_LAYERS)))
    cross = [(width, mlperf.DCN_LOW_RANK), (mlperf.DCN_LOW_RANK, width)] * mlperf.DCN_LAYERS
    products = sum(i * o for i, o in (*bottom, *top, *cross))
    biases = sum(o for _, o in (*bottom, *top)) + mlperf.DCN_LAYERS * width
    elementwise = mlperf.DCN_LAYERS * 2 * width
    # a cross layer: two linear layers without activation, one bias; forward a fused multiply-add of three tensors;
    # backward two products of two tensors, two by a number and two sums of two tensors
    crossed = mlperf.DCN_LAYERS * (2 * 3 * (width + mlperf.DCN_LOW_RANK) + (4 + 10 + 6 + 1) * width)
    traffic = linear_traffic((mlperf.DENSE_FEATURES, *mlperf.DENSE_ARCH_LAYERS)) + crossed + 4 * width  # and cat
    traffic += linear_traffic((width, *mlperf.OVER_ARCH_LAYERS))
    first = bottom[0][0] * bottom[0][1]  # the data need no gradient
    return DenseCost(
        parameters=products + biases,
        forward_flops=2 * products + biases + elementwise,
        backward_flops=4 * products - 2 * first + biases + 2 * elementwise,
        traffic=traffic,
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
