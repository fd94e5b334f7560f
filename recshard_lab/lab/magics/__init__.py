"""The notebook magics: each parses its line, calls the launcher and shows the result."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, needs_local_scope
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from recshard_lab import launcher
from recshard_lab.lab.draw.theme import bytes_text
from recshard_lab.lab.live.ranks_gone import lost_text
from recshard_lab.lab.magics.autoreload import Autoreload
from recshard_lab.lab.magics.output import NotebookPrinter, time_bars
from recshard_lab.launcher import LaunchError, RankError, Ranks, RanksInterrupted
from recshard_lab.sizes import gigabytes

__all__ = ["RecshardMagics", "load", "unload"]


_autoreload = Autoreload()
_NAME = re.compile(r"[^\W\d]\w*(?:\.\w*)*$")


def rank_list(text: str) -> list[int]:
    """``0,2`` or ``0-3`` as numbers.

    >>> rank_list("0,2-4")
    [0, 2, 3, 4]
    """
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
            raise ArgumentTypeError(f"{part!r} is not a rank: expected ranks like 0,2 or 0-3")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def device_list(text: str) -> str | list[int | str]:
    """``0,1`` as indices, ``MIG-5c1b`` as UUIDs, ``cpu`` and ``mps`` as they are.

    >>> device_list("0,1"), device_list("cpu"), device_list("MIG-5c1b,MIG-77aa")
    ([0, 1], 'cpu', ['MIG-5c1b', 'MIG-77aa'])
    """
    if text in ("cpu", "mps"):
        return text
    return [int(part) if part.isdecimal() else part for part in text.split(",")]


def seconds(text: str) -> float:
    """A time limit.

    >>> seconds("2.5")
    2.5
    """
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise ArgumentTypeError(f"{text!r} is not a time limit: expected seconds above 0")


def plain_errors(magic: Callable[..., Any]) -> Callable[..., Any]:
    """Errors of the launcher show their message in the notebook, without this package's traceback."""

    @wraps(magic)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return magic(*args, **kwargs)
        except (LaunchError, RankError, RanksInterrupted) as error:
            name = "KeyboardInterrupt" if isinstance(error, KeyboardInterrupt) else type(error).__name__
            lines = f"{name}: {error}".splitlines()
            error._render_traceback_ = lambda: lines  # type: ignore[union-attr]  # called by IPython
            raise

    return wrapped


@magics_class
class RecshardMagics(Magics):
    """``%recshard_launch``, ``%%recshard`` and the other magics of ranks."""

    @magic_arguments()
    @argument("-n", type=int, default=None, help="number of ranks; required")
    @argument("--nodes", type=int, default=1, help="number of virtual nodes; default: 1")
    @argument("--backend", default=None, help="gloo or nccl; default: nccl if each rank can have a GPU, otherwise gloo")
    @argument("--share-gpu", action="store_true", help="let several ranks compute on one GPU; times are not real")
    @argument("--devices", type=device_list, default=None, help="GPUs to use, as 0,1 or UUIDs; or cpu; default: all")
    @argument(
        "--memory-gb", type=gigabytes, default=None, metavar="GB", help="device memory of each rank: 2, 2GB or 2GiB"
    )
    @argument("--seed", type=int, default=None, help="repeatable random numbers, others on each rank; default: none")
    @argument("--threads", type=int, default=1, help="threads per rank of torch and numpy")
    @argument("--inter-node-latency", type=float, metavar="MS", help="emulated link between nodes: milliseconds")
    @argument("--inter-node-gbps", type=float, metavar="G", help="emulated link between nodes: Gbit/s per rank")
    @argument(
        "--start-method",
        default=None,
        help="fork or spawn (a clean interpreter per rank); default: fork on Linux, spawn on macOS",
    )
    @argument("--engine", default=None, help="local or ray (ranks on a Ray cluster); default: local")
    @argument("--address", default=None, help="address of the Ray cluster, or auto for the running one")
    @line_magic
    @plain_errors
    def recshard_launch(self, line: str) -> None:
        """Start ranks that stay until %recshard_stop, and bind them to the variable ``ranks``."""
        options = parse_argstring(self.recshard_launch, line)
        if options.n is None:
            raise UsageError("%recshard_launch needs the number of ranks. Fix: %recshard_launch -n 4")
        shape = launcher.Shape.checked(
            options.n,
            options.nodes,
            options.backend,
            options.threads,
            options.start_method,
            inter_node_latency_ms=options.inter_node_latency,
            inter_node_gbps=options.inter_node_gbps,
            engine=options.engine,
            address=options.address,
            share_gpu=options.share_gpu,
            devices=options.devices,
            memory_gb=options.memory_gb,
            seed=options.seed,
        )
        ranks, fresh = launcher.start(shape)
        if fresh:
            _announce(ranks)
        else:
            print(f"{ranks.shape} are running already; their variables are kept. %recshard_restart for fresh ones.")
        kept = self.shell.user_ns.setdefault("ranks", ranks)
        if isinstance(kept, Ranks):
            self.shell.user_ns["ranks"] = ranks
        else:
            print(
                f"The variable 'ranks' is a {type(kept).__name__} of this notebook and was kept. "
                "rs.launcher.current() returns the ranks."
            )

    @magic_arguments()
    @argument("--ranks", type=rank_list, default=None, help="which ranks, as 0,2 or 0-3; default: all")
    @argument(
        "--timeout",
        type=seconds,
        default=None,
        metavar="S",
        help="stop the cell after S seconds; ranks that do not answer within 5 s more are killed",
    )
    @argument("--quiet", action="store_true", help="show no output, only errors")
    @argument("--time", action="store_true", help="show how long each rank took")
    @cell_magic
    @plain_errors
    def recshard(self, line: str, cell: str) -> None:
        """Run the cell on every rank, in the rank's own namespace."""
        options = parse_argstring(self.recshard, line)
        cell = _autoreload.take_out(cell)
        _refuse_notebook_syntax(self.shell, cell)
        ranks = _running()
        chosen = ranks._chosen(options.ranks)
        reloading = _autoreload.on(self.shell)
        if reloading:
            _autoreload.before(ranks, chosen)
        printer = NotebookPrinter(chosen, quiet=options.quiet)
        results = ranks.exec(
            cell,
            ranks=chosen,
            filename=f"<cell [{_running_cell(self.shell)}]>",
            timeout_s=options.timeout,
            printer=printer,
        )
        if reloading:
            _autoreload.after(ranks, chosen)
        printer.results(results)
        if options.time:
            print(time_bars(results, ranks.times_note))

    @line_magic
    @plain_errors
    def recshard_status(self, line: str) -> None:
        """Show each rank's process, state and memory."""
        _refuse_arguments("recshard_status", line)
        ranks = launcher.current()
        if ranks is None:
            print("no ranks are running. %recshard_launch -n 4 starts four.")
            return
        print(repr(ranks)[1:-1])
        for row in ranks.status():
            node = f"  node {row.node}" if ranks.nodes > 1 else ""
            print(
                f"[{row.rank}] pid {row.pid}{node}  {row.state}  {row.device}  {bytes_text(row.memory_bytes)} resident"
            )

    @line_magic
    @plain_errors
    def recshard_stop(self, line: str) -> None:
        """Stop the ranks."""
        _refuse_arguments("recshard_stop", line)
        ranks = launcher.current()
        if ranks is None:
            print("no ranks are running; nothing to stop.")
            return
        lost = lost_text(ranks.variables)
        ranks.stop()
        print(f"{ranks.shape} stopped.{lost}")

    @line_magic
    @plain_errors
    def recshard_restart(self, line: str) -> None:
        """Replace the ranks by fresh ones of the same shape and seed."""
        _refuse_arguments("recshard_restart", line)
        ranks = _running()
        lost = lost_text(ranks.variables)
        ranks.restart()
        _announce(ranks, lost)

    @magic_arguments()
    @argument("names", nargs="+", help="names of the notebook's variables")
    @argument("--ranks", type=rank_list, default=None, help="to which ranks; default: all")
    @needs_local_scope
    @line_magic
    @plain_errors
    def recshard_push(self, line: str, local_ns: dict[str, Any] | None = None) -> None:
        """Copy variables of the notebook to the ranks."""
        options = parse_argstring(self.recshard_push, line)
        known = {**self.shell.user_ns, **(local_ns or {})}
        missing = [name for name in options.names if name not in known]
        if missing:
            raise UsageError(f"the notebook has no variable {missing[0]!r} to push. Fix: assign it first")
        _running().push({name: known[name] for name in options.names}, ranks=options.ranks)

    @magic_arguments()
    @argument("name", help="a variable on the ranks")
    @argument("--rank", type=int, default=None, help="from which rank; default: a list with the values of all ranks")
    @line_magic
    @plain_errors
    def recshard_pull(self, line: str) -> Any:
        """Give back a variable of the ranks: ``losses = %recshard_pull losses --rank 0``."""
        options = parse_argstring(self.recshard_pull, line)
        if not options.name.isidentifier():
            raise UsageError(f"%recshard_pull {options.name}: not a variable's name. Fix: ranks.eval({options.name!r})")
        if options.rank is None:
            return _running().pull(options.name)
        return _running().pull(options.name, ranks=[options.rank])[0]

    @magic_arguments()
    @argument("path", nargs="?", help="a bundle, or a folder of bundles; without it: show the running server")
    @argument("--port", type=int, default=0, help="port to listen on; default: a free one")
    @argument("--workers", type=int, default=1, help="processes; default: 1")
    @argument("--max-batch", type=int, default=256, help="samples of one call of the model; default: 256")
    @argument(
        "--delay-ms", type=float, default=0.0, metavar="MS", help="how long a request waits for others; default: 0"
    )
    @argument("--stop", action="store_true", help="stop the server")
    @line_magic
    def recshard_serve(self, line: str) -> None:
        """Serve a bundle beside the notebook, as ``server``. The server ends with the kernel.

        A variable ``server`` that is not a server is not overwritten: the magic refuses to start.
        """
        from recshard_lab.lab.live import serving

        options = parse_argstring(self.recshard_serve, line)
        try:
            if options.stop:
                address = serving.stop()
                print("no server is running; nothing to stop." if address is None else f"{address} stopped.")
                return
            if options.path is None:
                server = serving.current()
                idle = "no server is running. %recshard_serve FOLDER starts one."
                print(idle if server is None else serving.status(server))
                return
            self._refuse_to_overwrite_server()
            sizes = {"workers": options.workers, "max_batch": options.max_batch, "delay_ms": options.delay_ms}
            path = options.path.strip("\"'")
            self.shell.user_ns["server"] = server = serving.start(path, port=options.port, **sizes)
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            raise UsageError(f"%recshard_serve: {error}") from None
        print(serving.status(server))
        print("server.client() sends requests; the address opens a page to try them. %recshard_serve --stop ends it.")

    def _refuse_to_overwrite_server(self) -> None:
        from recshard_lab.serving import Server

        if not isinstance(value := self.shell.user_ns.get("server"), Server | None):
            raise ValueError(
                f"the notebook's variable 'server' ({type(value).__name__}) would be overwritten. "
                f"Fix: rename it, or run `del server`"
            )


def _running() -> Ranks:
    ranks = launcher.current()
    if ranks is None:
        raise LaunchError("no ranks are running. Start some first: %recshard_launch -n 4.")
    return ranks


def _running_cell(shell: InteractiveShell) -> int:
    """The number of the running cell: that of the last input. Newer IPython counts it before it runs."""
    return max(1, len(shell.history_manager.input_hist_raw) - 1)


def _refuse_arguments(magic: str, line: str) -> None:
    """Raises UsageError if a magic without arguments got some."""
    if line.strip():
        raise UsageError(f"%{magic} takes no arguments, got {line.strip()!r}. Fix: %{magic}")


def _announce(ranks: Ranks, lost: str = "") -> None:
    print(f"{ranks.shape} ready in {ranks.launch_s:.2f} s.{lost}")
    if notice := ranks.shape.notice():
        print(notice)


def _refuse_notebook_syntax(shell: InteractiveShell, cell: str) -> None:
    """Ranks run Python; ``%magic`` and ``!command`` lines belong to the notebook."""
    plain, transformed = cell.splitlines(), shell.transform_cell(cell).splitlines()
    for number, (before, after) in enumerate(zip(plain, transformed, strict=False), start=1):
        if "get_ipython()" in after and "get_ipython()" not in before:
            raise UsageError(
                f"line {number} of the cell, {before.strip()!r}, is a notebook command and ranks run plain Python. "
                "Fix: move it to a separate cell without %%recshard."
            )


@context_matcher()  # type: ignore[misc, unused-ignore]
def rank_names(context: CompletionContext) -> SimpleMatcherResult:
    """Completes names and attributes of rank 0 in ``%%recshard`` cells. Empty while the ranks are busy."""
    nothing: Any = {"completions": []}
    ranks = launcher.current()
    if ranks is None or not context.full_text.lstrip().startswith("%%recshard") or context.cursor_line == 0:
        return nothing
    word = _NAME.search(context.text_until_cursor)
    if word is None:
        return nothing
    fragment = word[0]
    prefix = fragment[: len(fragment) - len(context.token)] if fragment.endswith(context.token) else ""
    found = [SimpleCompletion(text=name[len(prefix) :], type="rank 0") for name in ranks.complete(fragment)]
    return {"completions": found, "matched_fragment": fragment[len(prefix) :], "suppress": bool(found)}


def load(shell: InteractiveShell) -> None:
    """Registers the magics and starts warming the forkserver in the background."""
    shell.register_magics(RecshardMagics)
    shell.Completer.custom_matchers.append(rank_names)
    launcher.warm()


def unload(shell: InteractiveShell) -> None:
    """Stops the ranks and the server, and removes the magics."""
    from recshard_lab.lab.live import serving

    serving.stop()
    ranks = launcher.current()
    if ranks is not None:
        ranks.stop()
    if rank_names in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(rank_names)
    for kind, names in RecshardMagics.magics.items():
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
