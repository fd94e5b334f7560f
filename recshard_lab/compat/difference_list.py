"""What a script for TorchRec meets here: differences that `install` does not hide."""

from __future__ import annotations

from dataclasses import dataclass

from recshard_lab.text_table import Printable, TextTable


@dataclass(frozen=True)
class Difference:
    """One subject.

    Attributes:
        subject: what differs.
        torchrec: in TorchRec 1.8.
        here: in this library, also under its TorchRec names.
    """

    subject: str
    torchrec: str
    here: str

    @property
    def names(self) -> tuple[str, ...]:
        """TorchRec's names whose behaviour differs; empty if no single name does."""
        return tuple(_NAMES.get(self.subject, "").split())

    def __str__(self) -> str:
        return f"{self.subject}: {self.torchrec} in TorchRec, {self.here} here"


@dataclass(frozen=True)
class Differences(Printable):
    """All differences; `print` them.

    Attributes:
        rows: one per subject.
    """

    rows: tuple[Difference, ...]

    def parts(self) -> list[str | TextTable]:
        """The table."""
        return [TextTable(("subject", "TorchRec", "here"), [(d.subject, d.torchrec, d.here) for d in self.rows])]


_DIFFERENCES = (
    Difference("first weights on CPU", "each rank draws its shards", "scattered from rank 0, as on GPUs"),
    Difference("rectangles of a plan", "those of a named scheme", "any tiling: rs.sharding.tiling(...)"),
    Difference("ParameterSharding, ShardingEnv, codecs", "fields can be assigned", "frozen: dataclasses.replace(...)"),
    Difference("a plan in a file", "torch.save(plan)", "plan.to_json(); from_torchrec reads theirs"),
    Difference("row-wise Adagrad, column shards", "one norm per column shard", "one norm per row, as unsharded"),
    Difference("mean pooling, mixed plan", "divided by the length twice", "divided once, as unsharded"),
    Difference("mean pooling, grid_shard", "the sum", "the mean, as unsharded"),
    Difference("config.init_fn left out", "a uniform draw", "None; a collection draws the same weights"),
    Difference("virtual tables", "CUDA kernels, eviction policies", "DynamicEmbeddingConfig; the fields are refused"),
    Difference("KeyedOptimizer.init_state", "steps with the learning rate", "steps with a learning rate of 0"),
    Difference("KeyedOptimizerWrapper.zero_grad", "ignores set_to_none", "follows set_to_none"),
    Difference("row_wise bags on CPUs", "no option of a plan", "an option, if a constraint names row_wise"),
    Difference("planner without parts", "its proposers", "this library's search; TorchRec's loop if you pass a part"),
    Difference("values beyond the sum of the lengths", "kept in values()", "left out; an error without install()"),
    Difference("a missing part, a wrong count", "AssertionError, IndexError", "ValueError with the value"),
    Difference("8-bit rows", "scale and bias to the nearest fp16", "rounded so that no weight is out of range"),
    Difference("quantized state dict", "rows padded to 16 bytes, and fbgemm's buffers", "rows without padding"),
    Difference("Criteo set, shuffled, unequal shares", "rank 0 has one batch more", "its last batch is larger"),
    Difference("window of weighted averages", "a step counts as one sample", "a sample counts as one"),
    Difference("lifetime AUPRC, fused tasks", "one value, the mean of the tasks", "a value of each task"),
    Difference("RecalibratedNEMetric(include_logloss=True)", "no log loss", "the log loss too"),
    Difference("RAUC of fewer than 2 samples", "ZeroDivisionError", "0.5"),
    Difference("clear(consumer) of a delta tracker", "the next read returns them all", "forgets what was not read"),
    Difference("value hindsight_target_pr", "memory that is not initialized", "the number of the threshold"),
    Difference("several shards of a table on a rank", "one parameter of all", "one parameter each"),
    Difference("fused_optimizer.params", "tables with a shard on this rank", "all tables, on all ranks"),
    Difference("order of names in dmp.state_dict()", "sorted, if DDP wraps the model", "that of the model"),
    Difference("parameters(recurse=False)", "stops at sharded modules", "the module's own, as in nn.Module"),
    Difference("columns that ranks do not divide", "refused", "split as evenly as possible"),
    Difference("rows < ranks, row_wise", "empty shards", "ranks without rows have no shard"),
    Difference("row_wise(sizes_placement)", "kernel 'quant', one process", "kernel 'dense', one rank per shard"),
    Difference("stages of a pipeline's subclass", "copy_batch_to_gpu and others are called", "an override is refused"),
    Difference("staged pipeline, new iterator", "first batches one run later", "fills the pipeline again"),
    Difference("CommType.MX4", "32 columns share an exponent", "refused: messages do not pad rows to groups"),
    Difference("CommType.FP8 on CPUs", "a codec, but no messages", "a codec, and messages"),
    Difference("ids out of range", "BoundsCheckMode", "out_of_range='error', 'clamp' or 'ignore'"),
)

_NAMES = {
    "first weights on CPU": "DistributedModelParallel DMPCollection",
    "row-wise Adagrad, column shards": "RowWiseAdagrad",
    "mean pooling, grid_shard": "grid_shard",
    "path in DLRM": "DLRM DLRMTrain DLRM_DCN",
    "CommType.MX4": "CommType QCommsConfig",
    "KeyedOptimizer.init_state": "KeyedOptimizer",
    "KeyedOptimizerWrapper.zero_grad": "KeyedOptimizerWrapper",
}
"""Subject -> the names that it concerns, for `recshard port` and `recshard bench compat`."""


def differences_of(name: str) -> list[Difference]:
    """What differs under one of TorchRec's names.

    Args:
        name: without its module.

    >>> [str(entry) for entry in differences_of("grid_shard")]
    ['mean pooling, grid_shard: the sum in TorchRec, the mean, as unsharded here']
    """
    return [entry for entry in _DIFFERENCES if name in entry.names]


def differences() -> Differences:
    """What differs from TorchRec 1.8 under its names.

    >>> print(differences().rows[1].here)
    any tiling: rs.sharding.tiling(...)
    """
    return Differences(_DIFFERENCES)
