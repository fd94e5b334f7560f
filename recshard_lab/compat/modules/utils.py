"""``torchrec.modules.utils``: checks and copies of dense modules, and the splitting of looked-up rows by feature.

Shape letters: B batch, F features, N ids, D columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.compat.refusals import Refusal, refuses
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor

TensorCallable = Callable[[Tensor], Tensor]


def extract_module_or_tensor_callable(
    module_or_callable: Callable[[], nn.Module] | nn.Module | TensorCallable,
) -> nn.Module | TensorCallable:
    """A module, the module that a function or class without required arguments returns, or a function of a tensor.

    Raises:
        TypeError: neither a module nor callable.
        ValueError: a function without arguments that returns no module.

    >>> extract_module_or_tensor_callable(nn.ReLU)
    ReLU()
    """
    if isinstance(module_or_callable, nn.Module):
        return module_or_callable
    if not callable(module_or_callable):
        raise TypeError(f"{module_or_callable!r} is not callable. Fix: pass a module, its class, or a function")
    try:
        inspect.signature(module_or_callable).bind()
    except (TypeError, ValueError):  # it needs an argument, or is a builtin as torch.relu
        return module_or_callable  # type: ignore[return-value]
    module = module_or_callable()  # type: ignore[call-arg]
    if not isinstance(module, nn.Module):
        raise ValueError(f"{module_or_callable!r} returned {type(module).__name__}. Fix: return a torch.nn.Module")
    return module


def get_module_output_dimension(module: TensorCallable | nn.Module, in_features: int) -> int:
    """Columns of the output for an input ``[1, in_features]``.

    >>> get_module_output_dimension(nn.Linear(3, 5), 3)
    5
    """
    return module(torch.zeros(1, in_features)).size(-1)


def check_module_output_dimension(module: Iterable[nn.Module] | nn.Module, in_features: int, out_features: int) -> bool:
    """Whether a module, or each module of a list, has `out_features` output columns.

    >>> check_module_output_dimension([nn.Linear(3, 5), nn.Linear(3, 4)], 3, 5)
    False
    """
    if isinstance(module, nn.ModuleList) or not isinstance(module, nn.Module):
        return all(check_module_output_dimension(each, in_features, out_features) for each in module)
    return get_module_output_dimension(module, in_features) == out_features


def init_mlp_weights_xavier_uniform(m: nn.Module) -> None:
    """Draws the weight of a linear layer by Xavier's uniform distribution, and zeroes its bias.

    Other modules do not change. Use it as ``model.apply(init_mlp_weights_xavier_uniform)``.

    >>> layer = nn.Linear(3, 2); init_mlp_weights_xavier_uniform(layer); layer.bias.tolist()
    [0.0, 0.0]
    """
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
        if m.bias is not None:
            nn.init.zeros_(m.bias)


def construct_modulelist_from_single_module(module: nn.Module, sizes: tuple[int, ...]) -> nn.ModuleList:
    """Copies of a module in nested lists of these sizes. The linear layers of each copy are drawn anew.

    Raises:
        ValueError: no size, or a size below 1.

    >>> len(construct_modulelist_from_single_module(nn.Linear(3, 2), (2, 4))[1])
    4
    """
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes must be numbers from 1, got {sizes}. Fix: pass a tuple such as (2, 3)")
    if len(sizes) > 1:
        return nn.ModuleList(construct_modulelist_from_single_module(module, sizes[1:]) for _ in range(sizes[0]))
    return nn.ModuleList(deepcopy(module).apply(init_mlp_weights_xavier_uniform) for _ in range(sizes[0]))


def convert_list_of_modules_to_modulelist(modules: Iterable[Any], sizes: tuple[int, ...]) -> nn.ModuleList:
    """Nested lists of modules as nested ``ModuleList``.

    Raises:
        ValueError: a list of another length than its size.

    >>> len(convert_list_of_modules_to_modulelist([nn.ReLU(), nn.ReLU()], (2,)))
    2
    """
    found = list(modules)
    if len(found) != sizes[0]:
        raise ValueError(f"got {len(found)} modules for sizes {sizes}. Fix: pass {sizes[0]} modules")
    if len(sizes) == 1:
        return nn.ModuleList(found)
    return nn.ModuleList(convert_list_of_modules_to_modulelist(each, sizes[1:]) for each in found)


def deterministic_dedup(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ids in order, and the place of the last occurrence of each, both ``[U]``.

    >>> deterministic_dedup(torch.tensor([3, 1, 3]))
    (tensor([1, 3]), tensor([1, 2]))
    """
    ordered, places = torch.sort(ids, stable=True)
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return ordered[last], places[last]


def jagged_index_select_with_empty(values: Tensor, ids: Tensor, offsets: Tensor, output_offsets: Tensor) -> Tensor:
    """The values of some bags, one after another ``[M, 1]``.

    Args:
        values: of all bags ``[N]``.
        ids: numbers of the bags to return ``[K]``.
        offsets: the end of each bag in `values`, without a leading zero.
        output_offsets: the end of each returned bag ``[K]``.

    >>> ends = torch.tensor([2, 3])
    >>> jagged_index_select_with_empty(torch.tensor([7, 8, 9]), torch.tensor([1, 0]), ends, torch.tensor([1, 3])).T
    tensor([[9, 7, 8]])
    """
    if not ids.numel():
        return values.new_empty(0)
    starts = nn.functional.pad(offsets, (1, 0))[:-1]
    lengths = (offsets - starts)[ids]
    total = int(output_offsets[-1])
    within = torch.arange(total, device=values.device) - torch.repeat_interleave(
        output_offsets - lengths, lengths, output_size=total
    )
    places = torch.repeat_interleave(starts[ids], lengths, output_size=total) + within
    return values.flatten()[places].unsqueeze(-1)


@refuses(seq_vbe_ctx=Refusal("it is internal to TorchRec's sharded collections", "pass None"))
def construct_jagged_tensors(
    embeddings: Tensor,
    features: KeyedJaggedTensor,
    embedding_names: Sequence[str],
    need_indices: bool = False,
    features_to_permute_indices: Mapping[str, Sequence[int]] | None = None,
    original_features: KeyedJaggedTensor | None = None,
    reverse_indices: Tensor | None = None,
    seq_vbe_ctx: Any = None,
    use_gather_select: bool = False,
) -> dict[str, JaggedTensor]:
    """Looked-up rows ``[N, D]`` as one JaggedTensor per embedding name.

    Args:
        embeddings: one row per id of `features`, or per distinct id with `reverse_indices`.
        features: the looked-up ids.
        embedding_names: a name per key. Rows of one name that occurs several times are joined by columns.
        need_indices: whether results have their ids as weights.
        features_to_permute_indices: name -> order of its column shards.
        original_features: the ids before they were made distinct.
        reverse_indices: for each id the row of `embeddings`, ``[N]``.
        seq_vbe_ctx: None. The context of variable batches is internal to TorchRec's sharded collections.
        use_gather_select: selects a kernel in TorchRec; the result is the same.

    Raises:
        ValueError: a `seq_vbe_ctx`.

    >>> ids = KeyedJaggedTensor(["a", "b"], torch.tensor([4, 5, 6]), lengths=torch.tensor([2, 1]))
    >>> construct_jagged_tensors(torch.ones(3, 2), ids, ["a", "b"])["b"].values().shape
    torch.Size([1, 2])
    """
    ids = features if original_features is None else original_features
    lengths = list(ids.lengths().split([after - before for before, after in pairwise(ids.lengths_offset_per_key())]))
    return _by_name(
        embeddings, lengths, ids.values(), embedding_names, need_indices, features_to_permute_indices, reverse_indices
    )


def construct_jagged_tensors_inference(
    embeddings: Tensor,
    lengths: Tensor,
    values: Tensor,
    embedding_names: Sequence[str],
    need_indices: bool = False,
    features_to_permute_indices: Mapping[str, Sequence[int]] | None = None,
    reverse_indices: Tensor | None = None,
    remove_padding: bool = False,
) -> dict[str, JaggedTensor]:
    """As `construct_jagged_tensors`, from lengths ``[F, B]`` and ids ``[N]``.

    Args:
        embeddings, embedding_names, need_indices, features_to_permute_indices, reverse_indices: as there.
        lengths: of the bags ``[F, B]``.
        values: the ids ``[N]``.
        remove_padding: whether to drop rows of `embeddings` beyond N.

    >>> lengths, ids = torch.tensor([[2], [1]]), torch.arange(3)
    >>> construct_jagged_tensors_inference(torch.ones(3, 2), lengths, ids, ["a", "b"])["a"].lengths()
    tensor([2])
    """
    if reverse_indices is None and remove_padding:
        embeddings = embeddings[: int(lengths.sum())]
    return _by_name(
        embeddings,
        list(lengths.unbind(0)),
        values,
        embedding_names,
        need_indices,
        features_to_permute_indices,
        reverse_indices,
    )


def _by_name(
    embeddings: Tensor,
    lengths: Sequence[Tensor],
    ids: Tensor,
    names: Sequence[str],
    need_indices: bool,
    orders: Mapping[str, Sequence[int]] | None,
    reverse_indices: Tensor | None,
) -> dict[str, JaggedTensor]:
    if reverse_indices is not None:
        embeddings = embeddings.index_select(0, reverse_indices)
    sizes = [int(own.sum()) for own in lengths]
    rows, own_ids = embeddings.split(sizes), ids.split(sizes)
    parts: dict[str, list[int]] = {}
    for place, name in zip(range(len(sizes)), names, strict=False):
        parts.setdefault(name, []).append(place)
    found = {}
    for name, places in parts.items():
        order = [places[number] for number in (orders or {}).get(name, range(len(places)))]
        joined = torch.cat([rows[place] for place in order], dim=1)
        first = places[0]
        found[name] = JaggedTensor(joined, lengths=lengths[first], weights=own_ids[first] if need_indices else None)
    return found


def reorder_inverse_indices(
    inverse_indices: tuple[Sequence[str], Tensor] | None, feature_names: Sequence[str]
) -> Tensor:
    """The inverse indices ``[F, B]`` of a variable batch with a row per feature name; empty without inverse indices.

    Raises:
        KeyError: a name without inverse indices.

    >>> reorder_inverse_indices((["b", "a"], torch.tensor([[0, 1], [1, 1]])), ["a"])
    tensor([[1, 1]])
    """
    if inverse_indices is None:
        return torch.empty(0)
    keys, indices = inverse_indices
    row = {key: number for number, key in enumerate(keys)}
    return indices[[row[name] for name in feature_names]]


def process_pooled_embeddings(pooled_embeddings: Sequence[Tensor], inverse_indices: Tensor) -> Tensor:
    """Pooled rows ``[B_f, D_f]`` of each feature of a variable batch, repeated for each sample ``[B, sum of D]``.

    >>> process_pooled_embeddings([torch.tensor([[1.0], [2.0]])], torch.tensor([[1, 0, 1]])).T
    tensor([[2., 1., 2.]])
    """
    repeated = [rows.index_select(0, own) for rows, own in zip(pooled_embeddings, inverse_indices, strict=True)]
    return torch.cat(repeated, dim=1)


def reset_module_states_post_sharding(module: nn.Module) -> None:
    """Clears what submodules cached before they were sharded: calls ``clear_cache()`` of each that has it.

    >>> from recshard_lab.embedding import KTRegroupAsDict
    >>> reset_module_states_post_sharding(nn.Sequential(KTRegroupAsDict([["a"]], ["x"])))
    """
    for child in module.modules():
        clear = getattr(child, "clear_cache", None)
        if callable(clear):
            clear()
