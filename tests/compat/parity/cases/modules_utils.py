"""torchrec.modules.utils: checks, copies, and rows split by feature."""

from typing import Any

import torch
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.modules.utils import (
    check_module_output_dimension,
    construct_jagged_tensors,
    construct_jagged_tensors_inference,
    construct_modulelist_from_single_module,
    convert_list_of_modules_to_modulelist,
    deterministic_dedup,
    extract_module_or_tensor_callable,
    get_module_output_dimension,
    init_mlp_weights_xavier_uniform,
    jagged_index_select_with_empty,
    reset_module_states_post_sharding,
)

from tests.compat.parity.case import case, raised

UTILS = "torchrec.modules.utils"


@case(f"{UTILS}.extract_module_or_tensor_callable")
def modules_and_functions() -> Any:
    module, double = nn.ReLU(), lambda x: x * 2
    return {
        "module": extract_module_or_tensor_callable(module) is module,
        "class": type(extract_module_or_tensor_callable(nn.PReLU)),
        "factory": type(extract_module_or_tensor_callable(lambda: nn.Tanh())),
        "builtin": extract_module_or_tensor_callable(torch.relu) is torch.relu,
        "function": extract_module_or_tensor_callable(double) is double,
        "no module": raised(lambda: extract_module_or_tensor_callable(lambda: 3)),
        "number": raised(lambda: extract_module_or_tensor_callable(3)),
        "name": raised(lambda: extract_module_or_tensor_callable("relu")),
    }


@case(f"{UTILS}.get_module_output_dimension")
def output_dimensions() -> Any:
    modules = (nn.Linear(3, 5), torch.relu, nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    wrong = raised(lambda: get_module_output_dimension(nn.Linear(3, 5), 4))
    return [get_module_output_dimension(module, 3) for module in modules], wrong


@case(f"{UTILS}.check_module_output_dimension")
def output_dimensions_checked() -> Any:
    five, four = nn.Linear(3, 5), nn.Linear(3, 4)
    checked = (five, four, [five, five], [five, four], nn.ModuleList([five, nn.ModuleList([five])]), [])
    return [check_module_output_dimension(module, 3, 5) for module in checked]


@case(f"{UTILS}.init_mlp_weights_xavier_uniform")
def xavier() -> Any:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.LayerNorm(2), nn.Linear(2, 1))
    model.apply(init_mlp_weights_xavier_uniform)
    return dict(model.state_dict())


@case(f"{UTILS}.init_mlp_weights_xavier_uniform")
def xavier_of_a_container_alone() -> Any:
    model = nn.Sequential(nn.Linear(3, 2))
    init_mlp_weights_xavier_uniform(model)
    return dict(model.state_dict())


@case(f"{UTILS}.construct_modulelist_from_single_module")
def copies_in_nested_lists() -> Any:
    module = nn.Linear(3, 2)
    return dict(construct_modulelist_from_single_module(module, (2, 3)).state_dict())


@case(f"{UTILS}.construct_modulelist_from_single_module")
def copies_keep_other_layers() -> Any:
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    nn.init.constant_(module[1].weight, 3.0)
    found = construct_modulelist_from_single_module(module, (2,))
    return {"weights": dict(found.state_dict()), "shared": found[0][0].weight is module[0].weight}


@case(f"{UTILS}.convert_list_of_modules_to_modulelist")
def lists_of_modules() -> Any:
    one = nn.Linear(3, 2)
    flat = convert_list_of_modules_to_modulelist([one, nn.ReLU()], (2,))
    nested = convert_list_of_modules_to_modulelist([[nn.ReLU()], [nn.Tanh()]], (2, 1))
    return {
        "flat": [type(m) for m in flat],
        "same": flat[0] is one,
        "nested": [[type(m) for m in own] for own in nested],
    }


@case(f"{UTILS}.deterministic_dedup")
def last_occurrences() -> Any:
    return [deterministic_dedup(torch.tensor(ids, dtype=torch.int64)) for ids in ([3, 1, 3, 2, 1], [], [7])]


@case(f"{UTILS}.jagged_index_select_with_empty")
def bags_selected() -> Any:
    values, ends = torch.arange(6.0).reshape(6, 1), torch.tensor([2, 3, 6])
    return {
        "reordered": jagged_index_select_with_empty(values, torch.tensor([1, 0, 2]), ends, torch.tensor([1, 3, 6])),
        "repeated": jagged_index_select_with_empty(values, torch.tensor([2, 2]), ends, torch.tensor([3, 6])),
        "none": jagged_index_select_with_empty(values, torch.tensor([], dtype=torch.int64), ends, torch.tensor([])),
    }


def ids() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 7, 4, 5]), lengths=torch.tensor([2, 1, 0, 2]))


ROWS = torch.arange(10.0).reshape(5, 2)
AGAIN = torch.tensor([0, 1, 2, 0, 1])


def four_shards() -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """Two features, each in two column shards."""
    values, lengths = torch.tensor([1, 2, 7, 4, 5] * 2), torch.tensor([2, 1, 0, 2] * 2)
    return torch.arange(20.0).reshape(10, 2), KeyedJaggedTensor(["a", "b", "a", "b"], values, lengths=lengths)


@case(f"{UTILS}.construct_jagged_tensors")
def rows_by_feature() -> Any:
    return construct_jagged_tensors(ROWS, ids(), ["a", "b"])


@case(f"{UTILS}.construct_jagged_tensors")
def rows_by_feature_with_ids() -> Any:
    return construct_jagged_tensors(ROWS, ids(), ["x", "y"], need_indices=True)


@case(f"{UTILS}.construct_jagged_tensors")
def rows_of_distinct_ids() -> Any:
    distinct = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 7]), lengths=torch.tensor([1, 1, 0, 1]))
    return [
        construct_jagged_tensors(ROWS[:3], ids(), ["a", "b"], True, reverse_indices=AGAIN, use_gather_select=gather)
        for gather in (False, True)
    ] + [construct_jagged_tensors(ROWS[:3], distinct, ["a", "b"], True, original_features=ids(), reverse_indices=AGAIN)]


@case(f"{UTILS}.construct_jagged_tensors")
def rows_of_column_shards() -> Any:
    rows, kjt = four_shards()
    return [
        construct_jagged_tensors(rows, kjt, ["a", "b", "a", "b"], True, features_to_permute_indices=order)
        for order in ({}, {"a": [1, 0]})
    ]


@case(f"{UTILS}.construct_jagged_tensors")
def rows_that_do_not_fit() -> Any:
    return raised(lambda: construct_jagged_tensors(ROWS[:3], ids(), ["a", "b"]))


@case(f"{UTILS}.construct_jagged_tensors_inference")
def rows_for_serving() -> Any:
    lengths, values = ids().lengths().view(2, 2), ids().values()
    padded = torch.cat([ROWS, torch.zeros(2, 2)])
    return [
        construct_jagged_tensors_inference(ROWS, lengths, values, ["a", "b"]),
        construct_jagged_tensors_inference(ROWS[:3], lengths, values, ["a", "b"], True, reverse_indices=AGAIN),
        construct_jagged_tensors_inference(padded, lengths, values, ["a", "b"], remove_padding=True),
        raised(lambda: construct_jagged_tensors_inference(padded, lengths, values, ["a", "b"])),
    ]


@case(f"{UTILS}.construct_jagged_tensors_inference")
def rows_of_column_shards_for_serving() -> Any:
    rows, kjt = four_shards()
    return construct_jagged_tensors_inference(
        rows, kjt.lengths().view(4, 2), kjt.values(), ["a", "b", "a", "b"], features_to_permute_indices={"a": [1, 0]}
    )


@case(f"{UTILS}.reset_module_states_post_sharding")
def caches_cleared() -> Any:
    module = KTRegroupAsDict([["a"]], ["x"])
    first = module([KeyedTensor(["a"], [1], torch.ones(1, 1))])["x"]
    nothing = reset_module_states_post_sharding(nn.ModuleList([module, nn.Linear(1, 1)]))
    second = module([KeyedTensor(["b", "a"], [1, 2], torch.arange(3.0).reshape(1, 3))])["x"]
    return {"first": first, "returns": nothing, "second": second}


@case(f"{UTILS}.construct_jagged_tensors")
def rows_have_gradients() -> Any:
    rows = ROWS.clone().requires_grad_()
    found = construct_jagged_tensors(rows, ids(), ["a", "b"], reverse_indices=torch.tensor([0, 1, 1, 3, 0]))
    total = sum((jt.values().sum() for jt in found.values() if isinstance(jt, JaggedTensor)), torch.zeros(()))
    total.backward()
    return rows.grad
