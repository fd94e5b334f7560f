"""Replicates the dense part of a sharded model with torch's DistributedDataParallel, or shards it with FSDP2.

DistributedDataParallel averages gradients of dense parameters over the ranks in every step, also in steps that do not
use all of them. A rank that does not use a parameter adds zeros. A parameter that no rank uses keeps its ``grad``, so
its optimizer does not step it, as in the unsharded model.
"""

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from recshard_lab.arguments import checks_arguments
from recshard_lab.comm import Failed, ShardingEnv, broadcast, raise_after_backward, ring_bytes
from recshard_lab.comm.errors import error_for, mark, note_sent, raise_if_marked
from recshard_lab.comm.lost_ranks import wait
from recshard_lab.comm.trace import record

if TYPE_CHECKING:
    from recshard_lab.distributed.model_parallel import DistributedModelParallel

_FORMATS: dict[str | None, torch.dtype | None] = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


class DataParallelWrapper(ABC):
    """Replicates the dense part of a `DistributedModelParallel`; TorchRec's name."""

    @abstractmethod
    def wrap(self, dmp: "DistributedModelParallel", env: ShardingEnv, device: torch.device) -> None:
        """Replaces ``dmp.module``, which `DistributedModelParallel.forward` calls.

        Args:
            dmp: the model. Do not wrap ``dmp.sharded_parameter_names()``: the kernels step them.
            env: the ranks that share the dense part.
            device: device of the model.
        """


@checks_arguments
class DefaultDataParallelWrapper(DataParallelWrapper):
    """Wraps the model in DistributedDataParallel, which averages dense gradients while backward runs.

    ``find_unused_parameters`` is the default because only it supports steps that use different parameters.
    ``static_graph`` fixes the set in the first step: a later step that uses fewer is not averaged, without an error.
    The search takes 0.5 ms per step in a 3-layer MLP of 2 ms, and under 2% in an MLPerf-sized one of 110 ms (10th
    percentiles, 2 CPU ranks over Gloo).

    Args:
        bucket_cap_mb: size of a gradient bucket, in MiB.
        static_graph: every step uses the same parameters on every rank, so nothing is searched.
        find_unused_parameters: search the graph of every step for unused parameters. False is correct only if every
            step uses all of them. None means True unless ``static_graph``.
        allreduce_comm_precision: "fp16" or "bf16" halves the bytes; None sends gradients unchanged.
        params_to_ignore: names of further parameters and buffers that are not replicated.
        ddp_kwargs: further arguments of DistributedDataParallel.

    Raises:
        ValueError: an unknown precision, or ``static_graph`` together with ``find_unused_parameters``.

    >>> DefaultDataParallelWrapper(static_graph=True, allreduce_comm_precision="bf16").ddp_kwargs["static_graph"]
    True
    """

    def __init__(
        self,
        bucket_cap_mb: int = 25,
        static_graph: bool = False,
        find_unused_parameters: bool | None = None,
        allreduce_comm_precision: str | None = None,
        params_to_ignore: Sequence[str] | None = None,
        ddp_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if allreduce_comm_precision not in _FORMATS:
            raise ValueError(
                f"allreduce_comm_precision={allreduce_comm_precision!r} is not supported. Supported: 'fp16', 'bf16', "
                f"None"
            )
        if static_graph and find_unused_parameters:
            raise ValueError(
                "static_graph=True and find_unused_parameters=True are mutually exclusive: a static graph is not "
                "searched. Fix: remove one of them"
            )
        self.precision, self.params_to_ignore = allreduce_comm_precision, list(params_to_ignore or ())
        self.ddp_kwargs: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "static_graph": static_graph,
            "find_unused_parameters": not static_graph if find_unused_parameters is None else find_unused_parameters,
            "gradient_as_bucket_view": True,
            **(ddp_kwargs or {}),
        }

    def wrap(self, dmp: "DistributedModelParallel", env: ShardingEnv, device: torch.device) -> None:
        """Replicates ``dmp.module`` over ``env``; does nothing for one process or without dense parameters."""
        ignored = {*dmp.sharded_parameter_names(), *self.params_to_ignore}
        dense = [p for name, p in dmp.module.named_parameters() if name not in ignored and p.requires_grad]
        if env.pg is None or not dense:
            return
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(dmp.module, sorted(ignored))
        replicated = Replicated(dmp.module, process_group=env.pg, **self.ddp_kwargs)
        replicated.all_reduce = DenseAllReduce(env, _FORMATS[self.precision])
        replicated.register_comm_hook(replicated.all_reduce, DenseAllReduce.start)
        dmp._dmp_wrapped_module = replicated


class FullyShardWrapper(DataParallelWrapper):
    """Shards the dense part with FSDP2 (``torch.distributed.fsdp.fully_shard``) in place of replicating it.

    Each rank stores 1/W of the dense weights, gradients and optimizer states. Weights are all-gathered for forward
    and backward, gradients are reduce-scattered. A step gives the weights that `DefaultDataParallelWrapper` gives.

    Create the optimizer after `DistributedModelParallel`, over ``dmp.dense_parameters()``, which are DTensors then.
    ``dmp.state_dict()`` contains them as DTensors, and ``dmp.full_state_dict()`` as whole tensors.
    ``dmp.load_state_dict`` takes both.

    Args:
        modules: types of submodules that are gathered one at a time. Default: the whole dense part at once, which
            saves memory between steps only.
        fully_shard_kwargs: further arguments of ``fully_shard``, such as ``mp_policy`` or ``reshard_after_forward``.

    Raises:
        ValueError: ``mesh`` or ``ignored_params`` among the arguments: this class sets them.

    >>> FullyShardWrapper(modules=[nn.Linear], fully_shard_kwargs={"reshard_after_forward": False}).modules
    (<class 'torch.nn.modules.linear.Linear'>,)
    """

    def __init__(
        self, modules: Sequence[type[nn.Module]] = (), fully_shard_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.modules, self.fully_shard_kwargs = tuple(modules), dict(fully_shard_kwargs or {})
        for kind in self.modules:
            if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
                raise ValueError(
                    f"modules must be types of modules, got {kind!r:.80}. Fix: pass classes like nn.Linear"
                )
        taken = sorted({"mesh", "ignored_params"} & set(self.fully_shard_kwargs))
        if taken:
            raise ValueError(f"fully_shard_kwargs contains {taken}, which this wrapper sets. Fix: remove them")

    def wrap(self, dmp: "DistributedModelParallel", env: ShardingEnv, device: torch.device) -> None:
        """Shards ``dmp.module`` over ``env``, with rank 0's weights; does nothing without dense parameters."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        sharded = dmp.sharded_parameter_names()
        tables = {parameter for name, parameter in dmp.module.named_parameters() if name in sharded}
        dense = [parameter for parameter in dmp.module.parameters() if parameter not in tables]
        if env.pg is None or not dense:
            return
        with torch.no_grad():
            for tensor in [*dense, *dmp.module.buffers()]:
                broadcast(tensor, env, "dense")
        mesh = DeviceMesh.from_group(env.pg, device.type)
        for module in [*(m for m in dmp.module.modules() if isinstance(m, self.modules)), dmp.module]:
            fully_shard(module, mesh=mesh, ignored_params=tables, **self.fully_shard_kwargs)


@dataclass(frozen=True)
class DenseAllReduce:
    """DDP's average of a gradient bucket. Open traces record it, with the bytes of a ring.

    On CPU the wait names a rank that ends. An error of another sharding group, which `error_for` keeps, marks the
    message, and every rank raises the error when backward has ended.

    Attributes:
        env: the ranks.
        dtype: number format on the wire. Default: that of the gradients.
    """

    env: ShardingEnv
    dtype: torch.dtype | None

    def start(self, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """DDP's hook."""
        buffer = bucket.buffer()
        work, message, number = self.issue(buffer)
        if number is not None:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._wait(work, buffer, number))
        received: torch.futures.Future[Any] = work.get_future()
        return received.then(lambda reduced: buffer if message is buffer else buffer.copy_(reduced.value()[0]))

    def issue(self, buffer: Tensor) -> tuple[Any, Tensor, int | None]:
        """Issues the average of ``buffer``: torch's work, the message, and its number on CPU."""
        message = (buffer if self.dtype is None else buffer.to(self.dtype)).div_(self.env.world_size)
        record("all_reduce", "dense", ring_bytes(message.nbytes, self.env), 1, self.env)
        wire = self.env.wire
        number = wire.issued if buffer.device.type == "cpu" else None
        if number is not None:
            mark(message, self.env)
            note_sent(number, self.env)
        return wire.all_reduce(message), message, number

    def _wait(self, work: Any, buffer: Tensor, number: int) -> None:
        """Waits in the thread of backward, which then raises errors. DDP's own wait does not end."""
        wait(work, self.env, number, "dense")
        try:
            raise_if_marked(buffer, [buffer.numel()], number, self.env, summed=True)
        except Failed as failed:
            error_for(self.env)
            buffer.zero_()
            raise_after_backward(failed.error)


class Replicated(DistributedDataParallel):
    """DistributedDataParallel that finds the tensors in any pytree that the model returns, such as a KeyedTensor."""

    all_reduce: DenseAllReduce

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        specs: list[TreeSpec] = []

        def flatten(module: nn.Module, inputs: Any, output: Any) -> list[Any]:
            leaves, spec = tree_flatten(output)
            if self.find_unused_parameters and torch.is_grad_enabled():
                _refuse_hidden(leaves)
            specs.append(spec)
            return leaves

        hook = self.module.register_forward_hook(flatten)
        try:
            leaves = super().forward(*args, **kwargs)
        except RuntimeError as error:
            if "INTERNAL ASSERT" not in str(error) or "reducer.cpp" not in str(error):
                raise
            raise RuntimeError(
                "an error ended an earlier backward before DistributedDataParallel had averaged the dense gradients, "
                "so it cannot start another step. Fix: start the ranks again, or build the model again on all ranks"
            ) from error
        finally:
            hook.remove()
        return tree_unflatten(leaves, specs[0])

    def take_part(self) -> None:
        """Issues the messages of a backward, without gradients, as torch's ``join`` does. They are not waited for."""
        if not self.require_backward_grad_sync:
            return
        reducer = self.reducer
        for bucket in reducer._get_zeros_like_grad_buckets():
            self.all_reduce.issue(bucket.buffer())
        if self.find_unused_parameters:
            dist.all_reduce(reducer._get_local_used_map(), group=self.process_group, async_op=True)

    def _post_forward(self, output: Any) -> Any:
        """Searches the graph. The first search warns if the step uses all parameters, past Python's filters."""
        if not self.find_unused_parameters or Replicated._has_searched:
            return super()._post_forward(output)
        Replicated._has_searched = torch.is_grad_enabled()
        with _without_lines_on_stderr("find_unused_parameters=True was specified"):
            return super()._post_forward(output)

    _has_searched = False  # in this process; torch warns once a process


@contextmanager
def _without_lines_on_stderr(text: str) -> Iterator[None]:
    """Removes lines that contain ``text`` from the output to file descriptor 2, also of C++ code."""
    try:
        stderr = os.dup(2)
    except OSError:  # the process has no stderr
        yield
        return
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            for line in written:
                if text.encode() not in line:
                    os.write(2, line)


def _refuse_hidden(leaves: Sequence[Any]) -> None:
    """Raises if every tensor that requires a gradient is inside objects that torch cannot traverse."""
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        return
    hidden = next((leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_PLAIN))), None)
    if hidden is not None:
        raise ValueError(
            f"the model returns a {type(hidden).__name__}, which torch cannot traverse, and no other tensor that "
            f"requires a gradient, so the used parameters are unknown. Fix: return tensors, dicts, dataclasses or "
            f"registered pytree nodes, or pass "
            f"data_parallel_wrapper=DefaultDataParallelWrapper(find_unused_parameters=False)"
        )
