"""A `StepCase` in TorchRec; imported only by ranks in TorchRec's environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.apparatus.operators import as_one_operator
from benchmarks.apparatus.step_case import StepCase


class Theirs:
    """The model of one rank. In TorchRec, data-parallel tables are dense and use a torch optimizer."""

    def __init__(
        self,
        case: StepCase,
        weights: Mapping[str, NDArray[Any]] | None,
        learning_rate: float,
        eps: float,
        rectangles: Mapping[str, Any],
        backend: str | None = None,
    ) -> None:
        from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

        if case.wire != "fp32":
            raise ValueError(f"messages in {case.wire} are not set up on this side")
        self.case = case
        tables = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=case.rows,
                embedding_dim=case.dim,
                feature_names=[f"f{i}"],
                pooling=PoolingType.MEAN if case.mean else PoolingType.SUM,
            )
            for i, name in enumerate(case.table_names())
        ]
        kind, cpu = _dense_twin(case.optimizer), torch.device("cpu")
        settings = {"lr": learning_rate} | ({} if case.optimizer == "exact_sgd" else {"eps": eps})
        self.dense: Any = None
        self.model: Any
        if case.layout == "fused":
            self.model = FusedEmbeddingBagCollection(tables, kind, settings, device=cpu)
        else:
            self.model = _sharded(tables, case.optimizer, learning_rate, eps, rectangles, cpu)
            self.dense = _dense_optimizer(self.model, lambda parameters: kind(parameters, **settings))
        if weights is not None:
            with torch.no_grad():
                for name, row, col, held in self.pieces():
                    whole = torch.from_numpy(weights[name])
                    held.copy_(whole[row : row + held.shape[0], col : col + held.shape[1]])

    def batch(self, ids: Tensor, lengths: Tensor) -> Any:
        """The library's own jagged batch; `lengths` are table by table."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        return KeyedJaggedTensor([f"f{i}" for i in range(self.case.tables)], ids, lengths=lengths)

    def forward(self, batch: Any, ordered: bool = False) -> Tensor:
        """Pooled rows, [B, tables * dim]; `ordered` as the features are, otherwise as they come."""
        if self.dense is not None:
            self.dense.zero_grad()
        pooled = self.model(batch)
        return torch.cat([pooled[f"f{i}"] for i in range(self.case.tables)], 1) if ordered else pooled.values()

    @contextmanager
    def lookups_as_operators(self) -> Iterator[None]:
        """Counts fbgemm's lookup as one operator forward and one backward."""
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen as Tbe

        own = Tbe.forward
        Tbe.forward = lambda tbe, *args, **kwargs: _OneLookup.apply(
            torch.zeros((), requires_grad=True), lambda: own(tbe, *args, **kwargs)
        )
        try:
            yield
        finally:
            Tbe.forward = own

    def step(self) -> None:
        """Data-parallel tables; the others were stepped in backward."""
        if self.dense is not None:
            self.dense.step()

    def pieces(self) -> Iterator[tuple[str, int, int, Tensor]]:
        """This rank's part of the weights: table, first row, first column, values (views)."""
        for name, value in self.model.state_dict().items():
            table = name.removesuffix(".weight").rpartition(".")[2]
            if hasattr(value, "local_shards"):
                for shard in value.local_shards():
                    row, col = shard.metadata.shard_offsets
                    yield table, row, col, shard.tensor
            else:
                yield table, 0, 0, value.detach()


class _OneLookup(torch.autograd.Function):
    """A lookup that counts as one operator forward and one backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, look_up: Callable[[], Tensor]) -> Tensor:
        with as_one_operator("lookup_forward"), torch.enable_grad():
            ctx.rows = look_up()
        return ctx.rows.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with as_one_operator("lookup_backward"):
            torch.autograd.backward(ctx.rows, grads[0])
        return None, None


class _Holder(nn.Module):
    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, batch: Any) -> Any:
        return self.ebc(batch)


def _dense_twin(optimizer: str) -> Any:
    from torchrec.optim import RowWiseAdagrad

    twins: dict[str, Any] = {
        "exact_sgd": torch.optim.SGD,
        "exact_row_wise_adagrad": RowWiseAdagrad,
        "exact_adagrad": torch.optim.Adagrad,
    }
    return twins[optimizer]


def _dense_optimizer(model: Any, factory: Callable[[Any], Any]) -> Any:
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(rest, factory) if rest else None


def _sharded(
    tables: Any, optimizer: str, learning_rate: float, eps: float, rectangles: Mapping[str, Any], device: torch.device
) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    fused = {"optimizer": EmbOptimType(optimizer), "learning_rate": learning_rate, "eps": eps}
    return DistributedModelParallel(
        _Holder(EmbeddingBagCollection(tables, device=torch.device("meta"))),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"ebc": EmbeddingModuleShardingPlan(_entries(rectangles))}),
        sharders=[EmbeddingBagCollectionSharder(fused_params=fused)],
    )


def _entries(rectangles: Mapping[str, Any]) -> dict[str, Any]:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
    from torchrec.distributed.types import ParameterSharding

    found = {}
    for name, entry in rectangles.items():
        if entry["scheme"] == "data_parallel":
            ranks = [rank for rank, _, _ in entry["shards"]]
            found[name] = ParameterSharding("data_parallel", "dense", ranks, None)
            continue
        shards = [
            ShardMetadata([r0, c0], [r1 - r0, c1 - c0], f"rank:{rank}/cpu")
            for rank, (r0, r1), (c0, c1) in entry["shards"]
        ]
        ranks = list(dict.fromkeys(rank for rank, _, _ in entry["shards"]))
        found[name] = ParameterSharding(entry["scheme"], "fused", ranks, EnumerableShardingSpec(shards))
    return found
