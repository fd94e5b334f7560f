"""DLRM, DLRM-DCN and DLRM with projection for TorchRec: random data, training by a planned pipeline, AUROC."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.datasets.random import RandomRecDataset
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

FEATURES = DEFAULT_CAT_NAMES[:4]
ROWS, DIM, SAMPLES, STEPS, EVALUATED = 60, 16, 16, 4, 2


def batches(count: int, seed: int | None = None, most: int = 3) -> DataLoader[Batch]:
    """Without a seed, they are drawn from torch's global generator."""
    data = RandomRecDataset(
        keys=FEATURES,
        batch_size=SAMPLES,
        hash_size=ROWS,
        manual_seed=seed,
        ids_per_feature=most,
        min_ids_per_feature=0,
        num_dense=len(DEFAULT_INT_NAMES),
        num_batches=count,
    )
    return DataLoader(data, batch_size=None, batch_sampler=None, num_workers=0)


def model_of(kind: str) -> Any:
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
        for name in FEATURES
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    sizes: dict[str, Any] = {
        "dense_in_features": len(DEFAULT_INT_NAMES),
        "dense_arch_layer_sizes": [32, DIM],
        "over_arch_layer_sizes": [32, 1],
        "dense_device": torch.device("cpu"),
    }
    if kind == "dcn":
        return DLRM_DCN(embedding_bag_collection=ebc, dcn_num_layers=2, dcn_low_rank_dim=8, **sizes)
    if kind == "projection":
        branches = {f"interaction_branch{number}_layer_sizes": [32, 2 * DIM] for number in (1, 2)}
        return DLRM_Projection(embedding_bag_collection=ebc, **branches, **sizes)
    return DLRM(embedding_bag_collection=ebc, **sizes)


def fill(model: torch.nn.Module) -> None:
    """Weights that do not depend on the plan, by the numbers of the rows and columns."""

    def pattern(row: int, column: int, shape: torch.Size) -> torch.Tensor:
        rows, columns = torch.arange(row, row + shape[0])[:, None], torch.arange(column, column + shape[1])
        return ((rows * 31 + columns * 17) % 101 - 50) / 50 / DIM**0.5

    with torch.no_grad():
        for value in model.state_dict().values():
            if hasattr(value, "local_shards"):
                for shard in value.local_shards():
                    shard.tensor.copy_(pattern(*shard.metadata.shard_offsets, shard.tensor.shape))
            else:
                value.copy_(pattern(0, 0, value.view(len(value), -1).shape).view_as(value))


def main() -> None:
    dist.init_process_group(backend="gloo")
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")

    def show(value: Any) -> None:
        print(f"rank {rank} loss {float(value):.6f}", flush=True)

    for kind, optimizer_class in {
        "plain": torch.optim.SGD,
        "dcn": torch.optim.Adagrad,
        "projection": torch.optim.SGD,
    }.items():
        torch.manual_seed(rank)
        training, validation = batches(STEPS), batches(EVALUATED, seed=rank, most=1)
        settings = {"lr": 0.02, "eps": 1e-8} if kind == "dcn" else {"lr": 0.1}
        module = DLRMTrain(model_of(kind))
        apply_optimizer_in_backward(optimizer_class, module.model.sparse_arch.parameters(), {**settings})
        planner = EmbeddingShardingPlanner(
            topology=Topology(local_world_size=get_local_size(), world_size=world_size, compute_device="cpu"),
            batch_size=SAMPLES,
            storage_reservation=HeuristicalStorageReservation(percentage=0.05),
        )
        plan = planner.collective_plan(module, get_default_sharders(), dist.GroupMember.WORLD)
        model = DistributedModelParallel(module=module, device=device, plan=plan)
        planned = {name for tables in model._plan.plan.values() for name in tables}
        assert planned == {f"t_{name}" for name in FEATURES}
        fill(model)

        rest = dict(in_backward_optimizer_filter(model.named_parameters()))
        dense = KeyedOptimizerWrapper(rest, lambda params: optimizer_class(params, **settings))  # noqa: B023
        optimizer = CombinedOptimizer([model.fused_optimizer, dense])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
        pipeline = TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)

        pipeline._model.train()
        source = iter(training)
        for _ in range(STEPS):
            show(pipeline.progress(source)[0])
            schedule.step()
        show(sum(group["lr"] for group in pipeline._optimizer.param_groups))

        pipeline._model.eval()
        auroc = torchmetrics.AUROC(task="multiclass", num_classes=2).to(pipeline._device)
        relabelled: Iterable[Batch] = map(flip, itertools.islice(iter(validation), EVALUATED))
        with torch.no_grad():
            for _ in range(EVALUATED):
                loss, logits, labels = pipeline.progress(relabelled)
                chance = torch.sigmoid(logits)
                auroc(torch.stack((1 - chance, chance), dim=1), labels)
                show(loss)
        show(auroc.compute())
    dist.destroy_process_group()


def flip(batch: Batch) -> Batch:
    """The batch with the other labels."""
    batch.labels = 1 - batch.labels
    return batch


if __name__ == "__main__":
    main()
