"""TorchRec's ``shard_modules`` over float tables and over quantized ones."""

import torch

import recshard_lab as rs


def tables() -> rs.EmbeddingBagCollection:
    return rs.EmbeddingBagCollection(
        [rs.EmbeddingBagConfig(16, 8, name=name, feature_names=[name]) for name in ("a", "b")]
    )


BATCH = rs.KeyedJaggedTensor(["a", "b"], torch.tensor([3, 1, 4, 15]), lengths=torch.tensor([2, 1, 0, 1]))


def test_float_tables_are_sharded_over_the_ranks(served: None) -> None:
    from torchrec.distributed.shard import shard_modules
    from torchrec.distributed.types import ShardingEnv

    model = torch.nn.Sequential(tables())
    expected = model(BATCH).values()
    sharded = shard_modules(model, env=ShardingEnv.from_local(1, 0), device=torch.device("cpu"))
    assert isinstance(sharded[0], rs.distributed.ShardedCollection)
    assert torch.equal(sharded(BATCH).wait().values(), expected)


def test_quantized_tables_are_sharded_over_devices(served: None) -> None:
    from torchrec.distributed.shard import _shard_modules
    from torchrec.distributed.types import ShardingEnv

    quantized = rs.quantize_embeddings(torch.nn.Sequential(tables()), "int8")
    expected = quantized(BATCH).values()
    one = _shard_modules(module=quantized, env=ShardingEnv.from_local(1, 0), device=torch.device("cpu"))
    assert one is quantized
    plan = rs.plan(quantized, 2, a="row_wise", b="table_wise")
    two = _shard_modules(module=quantized, device=torch.device("cpu"), plan=plan)
    assert len(two.memory()) == 2
    assert torch.equal(two(BATCH).values(), expected)
