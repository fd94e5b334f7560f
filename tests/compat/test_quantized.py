"""Quantized models under TorchRec's names, where TorchRec needs a GPU: sharded over devices, loaded, pickled."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import recshard_lab as rs
from recshard_lab.compat.inference.modules import quantize_embeddings, quantize_inference_model, shard_quant_model
from recshard_lab.compat.quant import modules, sharded
from recshard_lab.sharding import ParameterConstraints, construct_module_sharding_plan, row_wise, table_wise

TWO = SimpleNamespace(world_size=2)
BATCH = rs.KeyedJaggedTensor(["f0", "f1"], torch.tensor([0, 9, 3, 2, 5]), lengths=torch.tensor([2, 0, 1, 2]))


def bags() -> rs.EmbeddingBagCollection:
    torch.manual_seed(3)
    return rs.EmbeddingBagCollection(
        [rs.EmbeddingBagConfig(10, 8, f"t{number}", feature_names=[f"f{number}"]) for number in range(2)]
    )


def quantized() -> Any:
    return quantize_inference_model(nn.Sequential(bags()))


@pytest.mark.parametrize("schemes", [{}, {"t0": ["row_wise"], "t1": ["column_wise"]}])
def test_a_quantized_model_over_two_devices_reads_the_same_rows(schemes: dict[str, list[str]]) -> None:
    model = quantized()
    constraints = {name: ParameterConstraints(sharding_types=kinds) for name, kinds in schemes.items()}
    served, plan = shard_quant_model(model, 2, "cpu", "cpu", constraints=constraints or None)
    assert torch.equal(served(BATCH).values(), model(BATCH).values())
    for name, kinds in schemes.items():
        assert plan.plan["0"][name].sharding_type == kinds[0]
    again, _ = shard_quant_model(model, 2, "cpu", sharding_plan=plan)
    assert torch.equal(again(BATCH).values(), model(BATCH).values())


def test_the_sharder_places_tables_as_its_plan_says() -> None:
    collection = quantized()[0]
    plan = construct_module_sharding_plan(collection, {"t0": row_wise(), "t1": table_wise(rank=1)}, world_size=2)
    sharder = sharded.QuantEmbeddingBagCollectionSharder(shardable_params=["t1"])
    served = sharder.shard(collection, plan, TWO)
    assert torch.equal(served(BATCH).values(), collection(BATCH).values())
    assert [device.memory().table_bytes > 0 for device in served.devices] == [True, True]
    assert list(sharder.shardable_parameters(collection)) == ["t1"]
    with pytest.raises(ValueError, match=r"\['cpu', 'cuda'\]. Fix: pass one environment"):
        sharder.shard(collection, plan, {"cpu": TWO, "cuda": TWO})


def test_split_scales_survive_a_pickle_and_a_move() -> None:
    module = bags()
    modules.quant_prep_enable_quant_state_dict_split_scale_bias(module)
    served = modules.EmbeddingBagCollection.from_float(module)
    expected = served(BATCH).values()
    for other in (pickle.loads(pickle.dumps(served)), served.to("cpu")):
        assert sorted(name.rpartition(".")[2] for name in other.state_dict()) == sorted(
            2 * ["weight", "weight_qbias", "weight_qscale"]
        )
        assert torch.equal(other(BATCH).values(), expected)


def test_weights_of_another_shape_are_refused() -> None:
    table = rs.EmbeddingBagConfig(10, 8, "t0", rs.DataType.INT8, ["f0"])
    wrong = {"t0": (torch.zeros(9, 8, dtype=torch.uint8), torch.zeros(9, 4, dtype=torch.uint8))}
    with pytest.raises(ValueError, match=r"'t0' has \[10, 12\] bytes, and its weights have \[9, 12\]"):
        modules.EmbeddingBagCollection([table], False, None, table_name_to_quantized_weights=wrong)
    with pytest.raises(ValueError, match="row_alignment=0"):
        modules.EmbeddingBagCollection([table], row_alignment=0)


def test_a_further_type_needs_its_quantized_form() -> None:
    with pytest.raises(ValueError, match="type Linear has no quantized form"):
        quantize_embeddings(nn.Sequential(bags()), torch.int8, True, additional_qconfig_spec_keys=[nn.Linear])


def rows_of(output: Any) -> torch.Tensor:
    """All rows of an output, also beside the rows of ids."""
    output = output[0] if isinstance(output, tuple) else output
    return torch.cat([part.values() for part in output.values()]) if isinstance(output, dict) else output.values()


def test_quantized_sequences_over_two_devices() -> None:
    torch.manual_seed(6)
    collection = modules.EmbeddingCollection.from_float(
        rs.EmbeddingCollection([rs.EmbeddingConfig(10, 8, f"t{n}", feature_names=[f"f{n}"]) for n in range(2)])
    )
    plan = construct_module_sharding_plan(collection, {"t0": row_wise(), "t1": table_wise(rank=1)}, world_size=2)
    served = sharded.QuantEmbeddingCollectionSharder().shard(collection, plan, TWO)
    assert torch.equal(rows_of(served(BATCH)), rows_of(collection(BATCH)))
