"""What TorchRec's tutorials and examples do, in our own words, under its import names, on CPU ranks."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import recshard_lab

TABLES = {"films": (40, 8), "people": (24, 8)}


def a_collection(**settings: Any) -> Any:
    import torchrec

    return torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=[f"{name}_seen"],
                pooling=torchrec.PoolingType.SUM,
            )
            for name, (rows, dim) in TABLES.items()
        ],
        **settings,
    )


def a_batch() -> Any:
    from torchrec import JaggedTensor, KeyedJaggedTensor

    films = JaggedTensor(values=torch.tensor([3, 1, 4, 15]), lengths=torch.tensor([3, 1]))
    people = JaggedTensor(values=torch.tensor([9, 2, 6]), lengths=torch.tensor([1, 2]))
    return KeyedJaggedTensor.from_jt_dict({"films_seen": films, "people_seen": people})


def test_a_planned_and_sharded_collection_gives_what_the_unsharded_one_gives(served: None) -> None:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.types import ShardingEnv

    ebc, batch = a_collection(), a_batch()
    sharder = EmbeddingBagCollectionSharder()
    plan = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cuda")).collective_plan(
        ebc, [sharder], None
    )
    sharded = sharder.shard(ebc, plan.plan[""], ShardingEnv.from_local(1, 0), torch.device("cpu"))
    output = sharded(batch).wait()
    assert output.keys() == ["films_seen", "people_seen"]
    assert torch.equal(output.values(), ebc(batch).values())
    assert sharded._input_dists
    assert sharded._lookups
    assert sharded._output_dists


def test_fused_params_step_the_tables_in_backward(served: None) -> None:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    from recshard_lab.embedding import EmbOptimType

    ebc, batch = a_collection(), a_batch()
    params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.5, "eps": 0.01}
    plan = construct_module_sharding_plan(
        ebc,
        {"films": table_wise(rank=0, compute_kernel="fused"), "people": row_wise(compute_kernel="fused")},
    )
    sharded = EmbeddingBagCollectionSharder(fused_params=params).shard(ebc, plan)
    assert "lr: 0.5" in str(sharded.fused_optimizer)
    assert dict(in_backward_optimizer_filter(sharded.named_parameters())) == {}
    losses = []
    for _ in range(2):
        loss = (1 - sharded(batch).wait().values()).sum()
        loss.backward()
        losses.append(loss.item())
    assert losses[1] < losses[0]


def test_fbgemms_own_names_of_optimizers_are_understood(served: None) -> None:
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs", exc_type=ImportError)
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    sharder = EmbeddingBagCollectionSharder({"optimizer": configs.EmbOptimType.EXACT_ADAGRAD})
    assert sharder.spec.optimizer is recshard_lab.embedding.EmbOptimType.EXACT_ADAGRAD


SPAWNING = """
import multiprocess
import torchrec
from torchrec.distributed.planner.types import ParameterConstraints

def one_rank(rank, world_size, constraints, module, store):
    import torch
    import torch.distributed as dist
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.types import ShardingEnv

    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world_size)
    device = torch.device(f"cuda:{rank}")
    torch.cuda.set_device(device)
    sharders = [EmbeddingBagCollectionSharder()]
    planner = EmbeddingShardingPlanner(Topology(world_size=world_size, compute_device="cuda"), constraints=constraints)
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    DistributedModelParallel(module, env=env, plan=plan, sharders=sharders, device=device)
    print(rank, *(entry.sharding_type for entry in plan.plan[""].values()), flush=True)
    dist.destroy_process_group()

tables = [torchrec.EmbeddingBagConfig(name=n, num_embeddings=40, embedding_dim=8, feature_names=[n]) for n in "ab"]
ebc = torchrec.EmbeddingBagCollection(device="cuda", tables=tables)
constraints = {n: ParameterConstraints(sharding_types=["row_wise"]) for n in "ab"}
processes = [
    multiprocess.get_context("spawn").Process(target=one_rank, args=(rank, 2, constraints, ebc, STORE))
    for rank in range(2)
]
for process in processes:
    process.start()
for process in processes:
    process.join()
    assert process.exitcode == 0
"""


@pytest.mark.gate
def test_ranks_that_a_tutorial_spawns_know_the_names_as_well(tmp_path: Path) -> None:
    script = "\n".join(
        [
            "from recshard_lab.compat.torchrec import install, translated",
            "if __name__ == '__main__':",
            "    install(shadow=True)",
            f"    source = {SPAWNING!r}.replace('STORE', repr({str(tmp_path / 'store')!r}))",
            "    exec(translated(source, world_size=10**6), globals())",
        ]
    )
    (tmp_path / "tutorial.py").write_text(script)
    root = str(Path(recshard_lab.__file__).parents[1])
    # buffered: unbuffered, a line is written in pieces, and two ranks' pieces mix
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "tutorial.py"],
        cwd=tmp_path,
        env={**buffered, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 row_wise row_wise", "1 row_wise row_wise"]
