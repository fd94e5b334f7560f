"""Lookup kernels: one table-batched lookup over all shards of a rank, with the optimizer inside backward.

::

    base.py           the interface, what a kernel knows of a shard, the known kernels and the choice among them
    native.py         torch operators: every device, number format and optimizer
    transposed.py     its lookup transposed: from rows to bags, for backward
    fbgemm.py         fbgemm's table-batched embeddings: CUDA, and CPU
    fbgemm_cached.py  fbgemm's cache on a GPU, of rows in unified memory
    numba/            compiled loops: CPU
    mapped.py         the base of kernels with a map in front: ids of any value, caches

A new backend is one file in this folder: a subclass of `LookupKernel`, decorated with `register_kernel`.
"""

from recshard_lab.embedding.kernels.base import TORCH_DTYPES as TORCH_DTYPES
from recshard_lab.embedding.kernels.base import KernelInput as KernelInput
from recshard_lab.embedding.kernels.base import KernelSpec as KernelSpec
from recshard_lab.embedding.kernels.base import LookupKernel as LookupKernel
from recshard_lab.embedding.kernels.base import RowNorms as RowNorms
from recshard_lab.embedding.kernels.base import ShardSpec as ShardSpec
from recshard_lab.embedding.kernels.base import available as available
from recshard_lab.embedding.kernels.base import choose_kernel as choose_kernel
from recshard_lab.embedding.kernels.base import kernel_named as kernel_named
from recshard_lab.embedding.kernels.base import kernel_names as kernel_names
from recshard_lab.embedding.kernels.base import notice_once as notice_once
from recshard_lab.embedding.kernels.base import register_kernel as register_kernel
