"""Switches that save launches change no result, and those that need a GPU say so."""

from typing import Any

import pytest
import torch

import recshard_lab as rl
from recshard_lab.models import DLRM, DLRMTrain
from recshard_lab.train import TrainPipelineSparseDist
from recshard_lab.train.launch_costs import compile_dense, dense_modules, graph_dense
from tests.train import pipeline_jobs as jobs

GPUS = torch.cuda.device_count()


def a_model(**options: Any) -> rl.DistributedModelParallel:
    torch.manual_seed(3)
    ebc = rl.EmbeddingBagCollection(jobs.tables())
    sharder = rl.distributed.EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": 0.1}, **options)
    return rl.DistributedModelParallel(DLRMTrain(DLRM(ebc, 3, [8], [4, 1])), sharders=[sharder], device="cpu")


def test_a_lookup_a_table_gives_what_one_for_all_gives() -> None:
    one, each = a_model(), a_model(batch_tables=False)
    path = "model.embedding_bag_collection"
    assert len(one.collections[path].executor.lookup.groups) == 1
    assert len(each.collections[path].executor.lookup.groups) == 4
    assert jobs.plain_loop(one, jobs.batches()) == jobs.plain_loop(each, jobs.batches())
    assert jobs.same_weights(one, each) == []


def test_unbatched_tables_whose_rows_lie_apart_are_refused_by_name() -> None:
    ebc = rl.EmbeddingBagCollection(jobs.tables())
    halves = [rl.Shard(0, (0, 29), (0, 4)), rl.Shard(0, (0, 29), (4, 8))]
    plan = rl.ShardingPlan(
        {"": {"t_a": rl.ParameterSharding("column_wise", shards=halves)}}  # type: ignore[dict-item]
    )
    whole = [rl.Shard(0, (0, 29), (0, 8))]
    plan.plan[""] |= {f"t_{k}": rl.ParameterSharding("table_wise", shards=whole) for k in "bcd"}
    sharder = rl.distributed.EmbeddingBagCollectionSharder({"optimizer": "exact_row_wise_adagrad"}, batch_tables=False)
    with pytest.raises(ValueError, match="batch_tables=False does not support table 't_a'"):
        rl.DistributedModelParallel(ebc, plan=plan, sharders=[sharder], device="cpu")


@pytest.mark.gate
@pytest.mark.filterwarnings("default:The .grad attribute:UserWarning")  # torch's own, which it hides by another filter
def test_a_compiled_dense_part_trains_alike() -> None:
    plain, compiled = a_model(), a_model()
    assert compile_dense(compiled, backend="aot_eager") == ["model.dense_arch", "model.inter_arch", "model.over_arch"]
    calls = [part._compiled_call_impl is not None for part in dense_modules(compiled).values()]
    assert all(calls)
    expected = jobs.plain_loop(plain, jobs.batches(4))
    assert jobs.plain_loop(compiled, jobs.batches(4)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif(GPUS > 0, reason="there is a GPU")
def test_what_needs_a_gpu_says_so() -> None:
    model = a_model()
    with pytest.raises(ValueError, match="graph_dense needs an NVIDIA GPU, and this machine has none"):
        graph_dense(model, jobs.batches(1)[0])
    with pytest.raises(ValueError, match="pin_memory=True needs a GPU, and batches go to cpu"):
        TrainPipelineSparseDist(model, jobs.dense_optimizer(model), jobs.CPU, pin_memory=True)


def test_a_model_without_a_dense_part_is_refused() -> None:
    bare = rl.DistributedModelParallel(rl.EmbeddingBagCollection(jobs.tables()), device="cpu")
    with pytest.raises(ValueError, match="no dense part"):
        compile_dense(bare)
    with pytest.raises(ValueError, match=r"model must be a torch.nn.Module, got 3"):
        compile_dense(3)  # type: ignore[arg-type]


@pytest.mark.cuda
@pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU on this machine")
def test_graphs_of_the_dense_part_train_alike() -> None:
    with rl.launch(GPUS) as ranks:
        for far in ranks.run(jobs.graphed):
            assert far == []
