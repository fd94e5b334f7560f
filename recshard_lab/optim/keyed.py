"""Optimizers whose state is named after the parameters, as a checkpoint of a sharded model needs it.

torch numbers parameters by their place in a list. Ranks hold different lists, so a number means nothing there; a
name does. Everything in this room is a `KeyedOptimizer`, and so are the wrappers and combinations of several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recshard_lab.arguments import checks_arguments
from recshard_lab.embedding.fused import FusedCollection

# The optimizer state of one parameter: its form in a state dict, the check before a load, and the load.


def plain_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A state for saving, without copies. Replaces each object that has ``state_dict()`` by its result."""
    nested = {key: plain_entry(value) for key, value in entry.items() if isinstance(value, dict)}
    objects = {key: value.state_dict() for key, value in entry.items() if _stateful(value, "state_dict")}
    return {**entry, **objects, **nested}


def checked_copies(current: dict[str, Any], loaded: Any, path: str) -> list[Callable[[], object]]:
    """Checks that a loaded state has the keys, shapes and shards of the current one.

    Returns:
        Calls that copy it into the current one. Nothing changes before.

    Raises:
        ValueError: it differs; names the first difference.
    """
    if not isinstance(loaded, Mapping):
        raise ValueError(f"state of {path!r} must be a dictionary with the keys {sorted(current)}, got {loaded!r:.80}")
    differ(f"the state of {path!r}", current, loaded)
    copies: list[Callable[[], object]] = []
    for key, value in current.items():
        new, name = loaded[key], f"{path}.{key}"
        if isinstance(value, dict):
            copies += checked_copies(value, new, name)
        elif (shards := local_shards(value)) is not None:
            if (others := local_shards(new)) is None:
                raise ValueError(f"state {name!r} is {_describe(new)}, expected a sharded tensor or DTensor")
            expected, layout = ([f"{list(t.shape)} at {list(start)}" for start, t in each] for each in (shards, others))
            if layout != expected:
                raise ValueError(
                    f"state {name!r} has local shards {layout}, expected {expected}. Fix: load it with "
                    f"torch.distributed.checkpoint, which reshards"
                )
            copies += [partial(own.detach().copy_, new) for (_, own), (_, new) in zip(shards, others, strict=True)]
        elif isinstance(value, Tensor):
            is_number = isinstance(new, int | float) and value.numel() == 1
            if not is_number and (not isinstance(new, Tensor) or new.shape != value.shape):
                raise ValueError(f"state {name!r} is {_describe(new)}, expected shape {list(value.shape)}")
            copies.append(partial(value.detach().fill_ if is_number else value.detach().copy_, new))
        elif _stateful(value, "load_state_dict"):
            copies.append(partial(value.load_state_dict, new))
        else:
            copies.append(partial(current.__setitem__, key, deepcopy(new)))
    return copies


def _stateful(value: Any, method: str) -> bool:
    return not isinstance(value, Tensor) and local_shards(value) is None and callable(getattr(value, method, None))


def local_shards(value: Any) -> list[tuple[tuple[int, ...], Tensor]] | None:
    """(offsets, tensor) of each shard on this rank of a torch ``ShardedTensor`` or DTensor. None for other values."""
    if hasattr(value, "local_shards"):
        return [(tuple(shard.metadata.shard_offsets), shard.tensor) for shard in value.local_shards()]
    if not hasattr(value, "to_local"):
        return None
    with torch.no_grad():
        local = value.to_local()
    tensors = local.local_shards() if hasattr(local, "local_shards") else [local]
    return [(tuple(c.offsets), tensor) for c, tensor in zip(value.__create_chunk_list__(), tensors, strict=True)]


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"


OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


@checks_arguments
class KeyedOptimizer(torch.optim.Optimizer):
    """An optimizer that knows its parameters by name.

    ``state_dict()`` is ``{"state": {name: {...}}}``; its tensors are the optimizer's own, not copies, so that a
    checkpoint is read straight into them. Param groups are left out unless `save_param_groups` asks for them: learning
    rates are set anew when training starts, and a rank does not hold every parameter.

    Args:
        params: name -> parameter, a tensor or one of torch's sharded tensors.
        state: parameter -> its state, nested dictionaries of tensors and plain values.
        param_groups: as of any torch optimizer, each ``{"params": [...], "lr": ...}``.

    Raises:
        ValueError: a state whose key is not one of the parameters.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = KeyedOptimizer({"w": weight}, {weight: {"step": torch.tensor(3)}}, [{"params": [weight]}])
    >>> optimizer.state_dict()
    {'state': {'w': {'step': tensor(3)}}}
    """

    _wrapped: Sequence[torch.optim.Optimizer] = ()

    def __init__(
        self, params: Mapping[str, Any], state: Mapping[Any, Any], param_groups: Collection[Mapping[str, Any]]
    ) -> None:
        known = {id(param) for param in params.values()}
        strangers = [key for key in state if id(key) not in known]
        if strangers:
            kinds = [tuple(k.shape) if isinstance(k, Tensor) else k for k in strangers]
            raise ValueError(
                f"the state has entries for {kinds}, which are not among the parameters {list(params)}: "
                f"key the state by the parameters themselves"
            )
        self._prepare()
        self.params = params
        self.state = state  # type: ignore[assignment]
        self.param_groups = param_groups  # type: ignore[assignment]

    def _prepare(self) -> None:
        """What torch's own constructor does, without asking for a list of parameters."""
        super().__setstate__({"defaults": {"_save_param_groups": False}})

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    @property
    def stepped_in_backward(self) -> list[str]:
        """Names of the parameters that never have a ``.grad``, for backward steps them."""
        return []

    def defer_steps(self) -> None:
        """Leaves the steps of fused tables to `step`, so that their gradients are known before. Others do not change.

        Raises:
            ValueError: a fused optimizer that cannot.
        """
        if self.stepped_in_backward:
            raise ValueError(
                f"{self.stepped_in_backward} are stepped in backward, which {type(self).__name__} cannot defer. Fix: "
                f'wrap the dense optimizer alone, and pass fused_params {{"gradient_clipping": True, '
                f'"max_gradient": ...}}'
            )

    def fused_norm_power(self, norm_type: float) -> list[Tensor]:
        """Sums of ``|g|^p`` of deferred gradients over all ranks, 0-d; the maximum for ``p = inf``. Collective."""
        return []

    def scale_fused_gradients(self, factor: Tensor) -> None:
        """Multiplies deferred gradients by a 0-d tensor."""

    def set_optimizer_step(self, step: int) -> None:
        """Passes the number of the step to wrapped optimizers that count their steps themselves."""
        self._tell("set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Passes these to wrapped optimizers that take them."""
        self._tell("update_hyper_parameters", params_dict)

    def _tell(self, method: str, value: Any) -> None:
        for optimizer in self._wrapped:
            if hasattr(optimizer, method):
                getattr(optimizer, method)(value)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """``{"state": {name: entry}}``, with ``"param_groups"`` (parameters by name) once asked for."""
        names = self._names()
        saved: dict[str, Any] = {"state": {names[id(param)]: plain_entry(own) for param, own in self.state.items()}}
        if self.defaults["_save_param_groups"]:
            saved["param_groups"] = [
                {"params": self._names_of(group)} | {k: deepcopy(v) for k, v in group.items() if k != "params"}
                for group in self.param_groups
            ]
        return saved

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuses a state that does not fit, before anything is changed.

        Raises:
            ValueError: entries missing or too many, tensors of another shape, other groups: named one by one.
        """
        given = section(state_dict, "state")
        names = self._names()
        held = {names[id(param)]: entry for param, entry in self.state.items()}
        if given and not held:
            raise ValueError(
                f"this optimizer has no state yet, the given one has {len(given)} entries ({sorted(given)[0]!r}, ...): "
                f"call init_state() first"
            )
        differ("this optimizer's entries", held, given)
        for name, entry in held.items():
            checked_copies(entry, given[name], name)
        if self.defaults["_save_param_groups"]:
            self._paired_groups(section(state_dict, "param_groups"))

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies a state into the tensors held here; groups too once `save_param_groups` asked for them.

        Raises:
            ValueError: as `check_state_dict`; then nothing has changed.
        """
        self.check_state_dict(state_dict)
        names = self._names()
        for param, entry in self.state.items():
            name = names[id(param)]
            for copy in checked_copies(entry, state_dict["state"][name], name):
                copy()
        if self.defaults["_save_param_groups"]:
            self._load_groups(state_dict["param_groups"])
        self.post_load_state_dict()

    def post_load_state_dict(self) -> None:
        """Called once a state is loaded; for subclasses that derive something from it."""

    def save_param_groups(self, save: bool) -> None:
        """Whether state dicts contain the param groups, and loading restores them.

        Learning-rate schedulers resume correctly only with True: many compute the next rate from the current one.
        """
        self.defaults["_save_param_groups"] = save

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Makes the state tensors that an optimizer makes in its first step, so that a state can be loaded into them.

        Takes one step with gradients of zero and learning rates of zero. Weights do not change, step counts do. A
        parameter without a gradient has one of zeros afterwards, as in TorchRec.

        Args:
            sparse_grad_parameter_names: parameters whose gradient is sparse.
        """
        sparse = set(sparse_grad_parameter_names or ())
        trained = {n: p for n, p in self.params.items() if isinstance(p, Tensor) and p.requires_grad}
        grads = {name: param.grad for name, param in trained.items()}
        rates = [(group, group["lr"]) for group in self.param_groups if group.get("lr") is not None]
        for name, param in trained.items():
            zeros = torch.zeros_like(param)
            param.grad = zeros.to_sparse(1) if name in sparse else zeros
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        self.step()
        for group, rate in rates:
            group["lr"] = rate
        for name, param in trained.items():
            if grads[name] is not None:
                param.grad = grads[name]

    def add_param_group(self, param_group: Any) -> None:
        """Refused: a parameter without a name could not be saved.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{type(self).__name__} knows its parameters by name: make a KeyedOptimizerWrapper of the new ones and "
            f"join both in a CombinedOptimizer"
        )

    # ---- names ----

    def _names(self) -> dict[int, str]:
        return {id(param): name for name, param in self.params.items()}

    def _names_of(self, group: Mapping[str, Any]) -> list[str]:
        names = self._names()
        return sorted(names[id(param)] for param in group["params"])

    def _load_groups(self, saved: Iterable[Mapping[str, Any]]) -> None:
        for group, settings in self._paired_groups(saved):
            group.update({key: deepcopy(value) for key, value in settings.items() if key != "params"})

    def _paired_groups(self, given: Iterable[Mapping[str, Any]]) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
        """Each group here with the saved one that has the same parameters.

        Saved groups may have further settings, such as the ``initial_lr`` of a scheduler.
        """
        own = {", ".join(self._names_of(group)): group for group in self.param_groups}
        theirs = {", ".join(sorted(group["params"])): group for group in given}
        differ("this optimizer's param_groups", own, theirs)
        for members, group in own.items():
            differ(f"the settings of param group [{members}]", group, group.keys() & theirs[members].keys())
        return [(group, theirs[members]) for members, group in own.items()]


def section(state_dict: Mapping[str, Any], key: str) -> Any:
    """``state_dict[key]``, or what to do about its absence."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"an optimizer's state dict must be a mapping, got {state_dict!r}")
    if key not in state_dict:
        raise ValueError(f"an optimizer's state dict has the key {key!r}, this one has only {sorted(state_dict)}")
    return state_dict[key]


def differ(what: str, held: Iterable[str], given: Iterable[str]) -> None:
    """Raises ValueError that names the keys that one side lacks."""
    missing, extra = (sorted(map(str, set(a) - set(b))) for a, b in ((held, given), (given, held)))
    found = [f"it lacks {missing}"] * bool(missing) + [f"it has {extra}, unknown here"] * bool(extra)
    if found:
        raise ValueError(f"the state given does not fit {what}: {', '.join(found)}")


@checks_arguments
class KeyedOptimizerWrapper(KeyedOptimizer):
    """Any torch optimizer, its parameters named.

    Args:
        params: name -> parameter.
        optim_factory: makes the optimizer, from a list of the parameters.
        pass_params_dict: hand the factory ``params`` itself instead.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> wrapped = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda ps: torch.optim.Adagrad(ps, lr=0.1))
    >>> list(wrapped.state_dict()["state"])
    ['weight']
    """

    def __init__(
        self, params: Mapping[str, Any], optim_factory: OptimizerFactory, pass_params_dict: bool = False
    ) -> None:
        try:
            self._optimizer = optim_factory(params if pass_params_dict else list(params.values()))
        except TypeError as error:
            raise ValueError(
                f"optim_factory makes no optimizer of the parameters {list(params)}: {error}. It is called with "
                f"{'the dictionary' if pass_params_dict else 'a list'} of them, and they must be tensors"
            ) from error
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise ValueError(f"optim_factory must make a torch optimizer, it made {self._optimizer!r}")
        self._wrapped = [self._optimizer]
        super().__init__(params, self._optimizer.state, self._optimizer.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the wrapped optimizer."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> Any:
        """One step of the wrapped optimizer."""
        return self._optimizer.step(closure) if closure is not None else self._optimizer.step()


# The face that optimizers stepped inside backward show to a training loop.


class FusedOptimizer(KeyedOptimizer):
    """Its parameters are stepped in backward: ``step`` has nothing to do, and ``zero_grad`` no ``.grad`` to clear."""

    @property
    def stepped_in_backward(self) -> list[str]:
        return list(self.params)

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Nothing to do: the states of fused tables are there from the start."""

    def step(self, closure: Any = None) -> Any:
        """Runs ``closure`` if given; the weights have moved already."""
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """There is nothing to clear."""


class EmptyFusedOptimizer(FusedOptimizer):
    """That of a model without a fused table.

    >>> EmptyFusedOptimizer().state_dict()
    {'state': {}}
    """

    def __init__(self) -> None:
        super().__init__({}, {}, [])


class FusedOptimizerModule(ABC):
    """A module that steps its parameters in backward and shows their optimizer."""

    @property
    @abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """Learning rates and states of the tables."""


class FusedCollectionOptimizer(FusedOptimizer):
    """Learning rate and states of an unsharded fused collection, for schedulers and state dicts.

    Parameters are named ``movies.weight``, and states ``movies.weight.momentum_1``, as in TorchRec. A changed ``lr`` of
    the param group applies from the next `step` or `zero_grad` on. States share memory with the kernel.

    Args:
        collection: its `FusedCollection.fused_optimizer` returns this optimizer.
    """

    def __init__(self, collection: FusedCollection) -> None:
        self._prepare()
        self._collection = collection
        self.param_groups = [{"params": list(self.params.values()), "lr": collection.optimizer_spec.learning_rate}]

    @property
    def params(self) -> dict[str, Any]:  # type: ignore[override]
        """Name -> weights ``[E, D]``."""
        holders = self._collection.get_submodule(self._collection.tables_name)
        return {f"{name}.weight": holder.weight for name, holder in holders.named_children()}

    @property
    def state(self) -> dict[Any, dict[str, Any]]:  # type: ignore[override]
        """Weights -> state name -> tensor, for rules with states."""
        params = self.params
        return {
            params[f"{table}.weight"]: {
                f"{table}.weight.{name.replace('momentum', 'momentum_')}": tensor for name, tensor in states.items()
            }
            for table, states in self._collection.optimizer_states().items()
            if states
        }

    def step(self, closure: Any = None) -> Any:
        """Runs ``closure`` if passed, and passes the learning rate to the kernel."""
        loss = super().step(closure)
        self.zero_grad()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Passes the learning rate to the kernel. Fused tables have no ``.grad``."""
        rate = float(self.param_groups[0]["lr"])
        if rate != self._collection.optimizer_spec.learning_rate:
            self._collection.set_learning_rate(rate)


FusedOptimizerModule.register(FusedCollection)
