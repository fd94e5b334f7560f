"""``ledger``, a device without hardware: it computes on the CPU and counts what a GPU would cost its host.

::

    counts.py    what is counted, and the recording
    device.py    the device: tensors, refused mixtures, synchronisations, copies, memory
    kernel.py    the lookup kernel: one operator forward, one backward
    mirror.py    one process as one rank of many, all with the same batch

Importing this room changes nothing. `register` makes torch and the kernels know the device for the whole process: torch
then has an accelerator. Call it in a separate process, for example on a launched rank.
"""

from benchmarks.ledger.counts import Counts as Counts
from benchmarks.ledger.counts import Sync as Sync
from benchmarks.ledger.counts import allocating as allocating
from benchmarks.ledger.counts import live as live
from benchmarks.ledger.counts import record as record
from benchmarks.ledger.device import DEVICE as DEVICE
from benchmarks.ledger.device import LedgerTensor as LedgerTensor
from benchmarks.ledger.device import mark as mark
from benchmarks.ledger.device import register_device
from benchmarks.ledger.device import unwrap as unwrap
from benchmarks.ledger.device import wrap as wrap
from benchmarks.ledger.kernel import LedgerFbgemmKernel as LedgerFbgemmKernel
from benchmarks.ledger.kernel import LedgerKernel as LedgerKernel
from recshard_lab.embedding.kernels import register_kernel


def register() -> None:
    """Registers the device and its lookup kernels for this process."""
    register_device()
    register_kernel(LedgerKernel)
    register_kernel(LedgerFbgemmKernel)
