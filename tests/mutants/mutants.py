"""Plausible mistakes, each in one place of the library, and the tests that must fail on it.

``old`` must stand exactly once in ``file``: a mutant whose code has changed is reported as stale, not as killed.
Mutants that nothing can tell apart from the code are not listed.
"""

import shlex
from typing import NamedTuple


class Mutant(NamedTuple):
    """One text replaced in one file.

    Attributes:
        name: room and what goes wrong.
        file: from the root of the repository, after ``recshard_lab/``.
        old, new: the texts.
        tests: arguments of pytest, after ``tests/`` but for doctests of ``recshard_lab/``; the fewest that can kill it.
    """

    name: str
    part: str
    old: str
    new: str
    about: str

    @property
    def file(self) -> str:
        """From the root of the repository."""
        return f"recshard_lab/{self.part}"

    @property
    def tests(self) -> list[str]:
        """Arguments of pytest."""
        words = shlex.split(self.about)
        return [f"tests/{w}" if w.endswith(".py") and not w.startswith("recshard_lab/") else w for w in words]


MUTANTS = [
    # ---- limits, holes, unequal replicas, dense and data-parallel costs ----
    Mutant(
        "plans: a hole before the first row shard is accepted",
        "sharding/plan/tiling.py",
        "        at = 0\n        for rect in sorted(rects",
        "        at = min((rect[axis][0] for rect in rects), default=0)\n        for rect in sorted(rects",
        "sharding/test_row_shards.py",
    ),
    Mutant(
        "cli: plan check without tables checks nothing",
        "cli/plan/check.py",
        "            read.validate(None, world_size)\n",
        "",
        "cli/test_plan.py -k check",
    ),
    Mutant(
        "routes: partial sums may fill fp16 alone",
        "distributed/step/output_dist/reduce_scatter.py",
        "codec.encode(summands, parts=self.env.world_size)",
        "codec.encode(summands)",
        "distributed/test_limits.py",
    ),
    Mutant(
        "replicas: fp16 is added in fp16",
        "distributed/state/replica_sync.py",
        "terms[0].to(torch.promote_types(terms.dtype, torch.float32))",
        "terms[0].clone()",
        "distributed/test_limits.py",
    ),
    Mutant(
        "replicas: the fewest steps count",
        "distributed/state/replica_sync.py",
        "return terms.amax(0)",
        "return terms.amin(0)",
        "distributed/test_limits.py",
    ),
    Mutant(
        "bounds: options cost half as much again",
        "planner/search/bounds.py",
        "base + paid - np.repeat(least, per) < step_ms",
        "base + 1.5 * (paid - np.repeat(least, per)) < step_ms",
        "planner/test_bounds_near_the_best.py",
    ),
    Mutant(
        "memory: a dense table's gradient is fp16",
        "planner/model/memory.py",
        "(per_element + 4 * dense)",
        "(per_element + 2 * dense)",
        "planner/test_costs_by_hand.py",
    ),
    Mutant(
        "costs: a dense optimizer passes twice over its table",
        "planner/model/cost.py",
        "dense * 3 * 4 * rows",
        "dense * 2 * 4 * rows",
        "planner/test_costs_by_hand.py",
    ),
    Mutant(
        "costs: replicas look up only their own batch in backward",
        "planner/model/lookup_costs.py",
        "        update += replicated * lookup * sent / np.maximum(ids, 1e-9)\n",
        "",
        "planner/test_costs_by_hand.py",
    ),
    Mutant(
        "costs: the dense part takes four operations a parameter",
        "planner/model/cost.py",
        "6.0 * workload.dense_parameters",
        "4.0 * workload.dense_parameters",
        "planner/test_costs_by_hand.py",
    ),
    Mutant(
        "costs: a bag costs nothing",
        "planner/model/lookup_costs.py",
        "vector_ms = 4 * cols / top.cache_bw + top.bag_ns * 1e-6",
        "vector_ms = 4 * cols / top.cache_bw",
        "planner/test_constants.py -k in_its_direction",
    ),
    Mutant(
        "costs: launches and arithmetic add up",
        "planner/model/cost.py",
        "max(workload.dense_launches * topology.launch_ms, compute_ms)",
        "workload.dense_launches * topology.launch_ms + compute_ms",
        "planner/test_whichever.py",
    ),
    Mutant(
        "costs: only senders take time",
        "planner/model/route_costs.py",
        "np.maximum((ranks - 1) * per_peer, total - per_peer) * (1 - self.half)",
        "(ranks - 1) * per_peer * (1 - self.half)",
        "planner/test_whichever.py",
    ),
    Mutant(
        "balance: the longest phase is to blame",
        "lab/views/balance.py",
        "worst = int(lost.argmax())",
        "worst = int(self.path.argmax())",
        "lab/test_balance.py -k 'by_hand or phase_that_loses_most'",
    ),
    Mutant(
        "estimate: only the first rank that is too full is named",
        "planner/model/estimate.py",
        "np.flatnonzero(self.held_bytes > self.usable_bytes).tolist()",
        "np.flatnonzero(self.held_bytes > self.usable_bytes)[:1].tolist()",
        "planner/test_too_full.py",
    ),
    Mutant(
        "pages: only the first two plans differ",
        "lab/exporting/plan_report.py",
        "planned = [each for each in candidates if each.plan is not None]",
        "planned = [each for each in candidates if each.plan is not None][:2]",
        "lab/test_comparison_pages.py",
    ),
    Mutant(
        "pages: the smallest tables are explained",
        "lab/exporting/plan_report.py",
        "key=lambda name: -named[name][0].weight_bytes",
        "key=lambda name: named[name][0].weight_bytes",
        "lab/test_comparison_pages.py",
    ),
    Mutant(
        "reshard: only weights move",
        "distributed/state/live_reshard.py",
        "            for name, parts in self.parts.items()\n            for part in parts\n        ]",
        "            for name, parts in self.parts.items()\n            for part in parts[:1]\n        ]",
        "distributed/test_reshard_every_scheme.py -k 2-exact_row_wise_adagrad",
    ),
    Mutant(
        "launcher: usable ranks are not started again",
        "launcher/session.py",
        "            self.stop()\n            self._started = World(self.asked)\n",
        "            if self.usable:\n                return\n"
        "            self.stop()\n            self._started = World(self.asked)\n",
        "launcher/test_restart.py -k lost_at_every_restart",
    ),
    Mutant(
        "plans: the last row shard has as many rows as the others",
        "sharding/schemes/even_tiling.py",
        "last = self.num_rows - self.hot_rows - self.block * (self.num_row_slices - 1)",
        "last = self.block",
        "sharding/test_row_shards.py",
    ),
    # ---- input and output exchange ----
    Mutant(
        "input: ids stay by source rank",
        "distributed/step/input_dist.py",
        "moved = gather_runs(received, starts.T.reshape(-1), counts.T.reshape(-1))",
        "moved = gather_runs(received, starts.reshape(-1), counts.reshape(-1))",
        "distributed/test_hot_rows.py",
    ),
    Mutant(
        "input: gradients of weights only where all ranks ask",
        "distributed/step/input_dist.py",
        "if sizes.weight_gradients.any() else None",
        "if sizes.weight_gradients.all() else None",
        "distributed/test_weight_gradients.py -k whoever",
    ),
    Mutant(
        "input: row numbers of huge shards are 32 bits wide",
        "distributed/step/input_dist.py",
        "narrow = layout.rows_fit_int32 and self.weight_dtype is not torch.float64",
        "narrow = self.weight_dtype is not torch.float64",
        "distributed/test_huge_rows.py",
    ),
    Mutant(
        "input: a last stripe that is larger counts as even",
        "distributed/step/bucketize.py",
        "return size if even and num_rows <= len(starts) * size else 0",
        "return size if even else 0",
        "distributed/test_bucketize.py",
    ),
    Mutant(
        "input: the first row of a range belongs to the range before it",
        "distributed/step/bucketize.py",
        "edge = torch.searchsorted(edges, rows, right=True) - 1",
        "edge = torch.searchsorted(edges, rows).sub(1).clamp(min=0)",
        "distributed/test_bucketize.py",
    ),
    # ---- routes ----
    Mutant(
        "routes: reduce-scatter forgets to scale gradients",
        "distributed/step/output_dist/reduce_scatter.py",
        "self.split(grad.view(-1), [samples], [samples], scale)",
        "self.split(grad.view(-1), [samples], [samples])",
        "distributed/test_routes.py -k all_summed",
    ),
    Mutant(
        "routes: the last column of a shard does not cross nodes",
        "distributed/step/output_dist/two_hop.py",
        "covered[feature.block][slice(*feature.shard.cols)] = True",
        "covered[feature.block][slice(*feature.shard.cols)][:-1] = True",
        "distributed/test_routes.py -k columns_of_one_node",
    ),
    Mutant(
        "routes: the buffers of the first hop are forgotten",
        "distributed/step/output_dist/two_hop.py",
        "        across.buffer_bytes += inside.buffer_bytes\n",
        "",
        "distributed/test_route_buffers.py",
    ),
    # ---- optimizers ----
    Mutant(
        "optimizers: mean squares over a shard's own columns",
        "embedding/optimizers/rules.py",
        'total = at.read("momentum1").add_(squares / at.full_dim)',
        'total = at.read("momentum1").add_(squares / at.grad.shape[1])',
        "distributed/test_optimizers.py -k every_optimizer_under_every_scheme",
    ),
    Mutant(
        "optimizers: LARS trusts a zero gradient",
        "embedding/optimizers/rules.py",
        "torch.where((weight > 0) & (grad > 0), ratio",
        "torch.where(weight > 0, ratio",
        "embedding/test_steps_by_hand.py",
    ),
    Mutant(
        "optimizers: L2 decay comes before clipping",
        "embedding/optimizers/steps.py",
        "    if spec.gradient_clipping:\n        at.grad.clamp_(-spec.max_gradient, spec.max_gradient)\n"
        "    if spec.weight_decay_mode is WeightDecayMode.L2:\n"
        "        at.grad.add_(at.values(), alpha=spec.weight_decay)\n",
        "    if spec.weight_decay_mode is WeightDecayMode.L2:\n"
        "        at.grad.add_(at.values(), alpha=spec.weight_decay)\n"
        "    if spec.gradient_clipping:\n        at.grad.clamp_(-spec.max_gradient, spec.max_gradient)\n",
        "embedding/test_steps_by_hand.py",
    ),
    Mutant(
        "optimizers: rows shorter than max_norm are stretched",
        "embedding/optimizers/steps.py",
        "(at.spec.max_norm / length).clamp_(max=1.0)",
        "(at.spec.max_norm / length)",
        "embedding/test_optimizers.py -k max_norm",
    ),
    # ---- reshard and checkpoints ----
    Mutant(
        "reshard: only what a rank sends is bounded",
        "distributed/state/moves.py",
        "max(sends[source], receives[target]) + size > round_bytes",
        "sends[source] + size > round_bytes",
        "distributed/test_reshard.py -k receives_from_all_others",
    ),
    Mutant(
        "reshard: extra memory is that of the last collection",
        "distributed/state/live_reshard.py",
        "totals[:] = map(sum, zip(totals, amounts, strict=True))",
        "totals[:] = amounts",
        "distributed/test_reshard.py -k peak_of_a_move",
    ),
    Mutant(
        "checkpoints: views are written with all they are a part of",
        "distributed/state/checkpoint/writer.py",
        "if copy.untyped_storage().nbytes() != copy.nbytes:",
        "if False:",
        "distributed/test_checkpoint_files.py",
    ),
    Mutant(
        "checkpoints: each rank checks rank 0's files",
        "complete_folders.py",
        "for name in sorted(files)[rank::world_size]:",
        "for name in sorted(files)[0::world_size]:",
        "distributed/test_checkpoint_files.py",
    ),
    # ---- planner ----
    Mutant(
        "planner: symmetry is broken though a table may not use every rank",
        "planner/search/exact.py",
        "len(option.usable) < problem.num_ranks",
        "len(option.usable) > problem.num_ranks",
        "planner/test_exact_program.py",
    ),
    Mutant(
        "planner: host memory has no limit",
        "planner/search/problem.py",
        "self.capacity = self.priced.room.copy()",
        "self.capacity = self.priced.room * np.array([1.0, 1e9])[: len(self.priced.room)]",
        "planner/test_tiers.py",
    ),
    Mutant(
        "planner: the exact plan is taken even if it is longer",
        "planner/search/greedy.py",
        "best = second if step_ms(second) <= step_ms(first) else first",
        "best = second",
        "planner/test_exact_program.py",
    ),
    Mutant(
        "planner: shards of one node count in full for what it sends on",
        "planner/model/loads.py",
        "shares[i] += (high - low) / len(holders)",
        "shares[i] += high - low",
        "planner/test_routes.py -k shares",
    ),
    # ---- memory ----
    Mutant(
        "memory: a reduce-scatter holds no received part",
        "planner/model/route_costs.py",
        "needed = needed + (self.ranks + 1) * summed",
        "needed = needed + self.ranks * summed",
        "planner/test_routes.py -k one_by_one",
    ),
    Mutant(
        "memory: optimizer state stays on the device",
        "planner/model/cost.py",
        "loads[MEMORY : MEMORY + 2] *= 1 - slow",
        "loads[MEMORY : MEMORY + 1] *= 1 - slow",
        "planner/test_costs_by_hand.py",
    ),
    Mutant(
        "memory: the host keeps no reserve",
        "planner/model/cost.py",
        "return self.topology.ddr_cap * (1 - self.topology.reserve_fraction)",
        "return float(self.topology.ddr_cap)",
        "planner/test_costs_by_hand.py",
    ),
    # ---- plans ----
    Mutant(
        "plans: a rank below 0 is one",
        "sharding/plan/validate.py",
        "if not 0 <= shard.rank < world_size:",
        "if not shard.rank < world_size:",
        "sharding/test_row_shards.py",
    ),
    Mutant(
        "plans: replicas may have some columns",
        "sharding/plan/validate.py",
        "if rect[1] != (0, table.embedding_dim):",
        "if False:",
        "sharding/test_row_shards.py",
    ),
    Mutant(
        "plans: true is version 1",
        "sharding/plan/plan_json.py",
        ' or isinstance(document.get("version"), bool)',
        "",
        "sharding/test_plan.py",
    ),
    # ---- keyed jagged tensors ----
    Mutant(
        "sparse: a permuted batch keeps its counts in place",
        "sparse/keyed_arrangement.py",
        "[counts[index] for index in indices],",
        "counts[: len(indices)],",
        "sparse/test_keyed_jagged_tensor.py",
    ),
    Mutant(
        "sparse: a part of a variable batch has the strides of the first keys",
        "sparse/keyed_arrangement.py",
        "None if self._strides is None else self._strides[start:end],",
        "None if self._strides is None else self._strides[: end - start],",
        "sparse/test_keyed_jagged_tensor.py",
    ),
    Mutant(
        "sparse: negative lengths are segments",
        "sparse/ops.py",
        "if lengths.numel() and int(lengths.min()) < 0:",
        "if lengths.numel() and int(lengths.min()) < -1:",
        "sparse/test_segment_ops.py",
    ),
    # ---- metrics ----
    Mutant(
        "metrics: every rank resumes with all sums",
        "train/metrics/sums.py",
        "mine = 1.0 if self.env.rank == 0 else 0.0",
        "mine = 1.0",
        "train/test_rank_metrics.py -k 'W2 and mid_window'",
    ),
    Mutant(
        "metrics: the click rate of NE has no weights",
        "train/metrics/sums.py",
        "return torch.stack([loss, samples.weights.sum(), (samples.weights * samples.labels).sum()])",
        "return torch.stack([loss, samples.weights.sum(), samples.labels.sum()])",
        "train/test_rank_metrics.py -k 'W2 and gathered_samples'",
    ),
    Mutant(
        "metrics: a window of throughput is one step too long",
        "train/metrics/throughput.py",
        "while self._window_time - self._window[0][0] >= self.window_seconds:",
        "while self._window_time >= self.window_seconds and len(self._window) > 1:",
        "train/test_rank_metrics.py -k throughput",
    ),
    # ---- data order and resume ----
    Mutant(
        "data: the short block is not where it was drawn",
        "data/order.py",
        "            sizes[self.blocks == blocks - 1] = size - (blocks - 1) * self.block\n",
        "            sizes[-1] = size - (blocks - 1) * self.block\n",
        "data/test_loader.py -k windows_hold",
    ),
    Mutant(
        "data: batches ahead at the end of an epoch are lost",
        "data/loader.py",
        "if batches_ahead and handed == 0 and epoch:",
        "if batches_ahead > 1 and handed == 0 and epoch:",
        "data/test_loader.py -k pipeline_still_holds",
    ),
    Mutant(
        "data: another window is the same order",
        "data/loader.py",
        '            "window": self.window,\n',
        "",
        "data/test_loader.py -k state_of_another_order",
    ),
    # ---- launcher ----
    Mutant(
        "launcher: only rank 0's variables are told",
        "launcher/world.py",
        "for names in self._names.values() for name in names",
        "for names in list(self._names.values())[:1] for name in names",
        "launcher/test_restart.py -k keep_variables",
    ),
    Mutant(
        "launcher: a late answer ends the next cell",
        "launcher/flight.py",
        "        elif cell != self.cell:\n            return  # a late answer to an earlier cell\n",
        "",
        "launcher/test_ranks.py -k next_cell",
    ),
    Mutant(
        "launcher: a time limit is met a second late",
        "launcher/flight.py",
        "time.monotonic() > self._deadline and not self.timed_out",
        "time.monotonic() > self._deadline + 1 and not self.timed_out",
        "launcher/test_restart.py -k soon_after",
    ),
    Mutant(
        "launcher: ranks in different collectives of one number agree",
        "launcher/hangs.py",
        "if len({window.since for window in told}) == 1 and len({window.digest for window in told}) > 1:",
        "if False:",
        "launcher/test_hangs.py -k compared_only",
    ),
    # ---- lab and command line ----
    Mutant(
        "lab: no best where one of the plans does not fit",
        "lab/compare/plan_comparison.py",
        "found[row.name] = good if len(good) < len(self.answers) else set()",
        "found[row.name] = good if len(good) < len(fit) else set()",
        "lab/test_compare_plans.py -k given_plan_that_is_too_large",
    ),
    Mutant(
        "lab: the slowest plan is one that does not fit",
        "lab/views/side_by_side.py",
        'worst = max(fit_ones, key=lambda name: drawn[name]["step_ms"])',
        'worst = max(drawn, key=lambda name: drawn[name]["step_ms"])',
        "lab/test_comparison_pages.py -k slowest_plan",
    ),
    Mutant(
        "lab: the largest change is the last one",
        "lab/views/waterfall.py",
        "best = max(range(1, len(times)), key=lambda i: times[i - 1] - times[i])",
        "best = len(times) - 1",
        "lab/test_waterfall.py",
    ),
    Mutant(
        "topology: memory of a GPU is the host's",
        "sharding/hardware/topology.py",
        'replace(self, hbm_cap=cap) if self.compute_device == "cuda" else replace(self, ddr_cap=cap)',
        "replace(self, ddr_cap=cap)",
        "cli/test_plan.py -k memory_of_one_rank",
    ),
    Mutant(
        "cli: two plans of one name are one",
        "cli/plan/compare.py",
        "        if name in requested:\n",
        "        if False:\n",
        "cli/test_compare.py -k two_plans",
    ),
    Mutant(
        "cli: plan check does not read the tables",
        "cli/plan/check.py",
        "read.resolved(read_source(source).by_module, world_size)",
        "read.validate(None, world_size)",
        "cli/test_plan.py -k check",
    ),
    Mutant(
        "cli: plan check ignores --ranks",
        "cli/plan/check.py",
        "world_size = ranks or read.world_size",
        "world_size = read.world_size",
        "cli/test_plan.py -k check",
    ),
    # ---- odd cells ----
    Mutant(
        "odd cells: a fork that comes back from a cell goes on as a rank",
        "launcher/rank.py",
        "                if os.getpid() != self.pid:\n                    leave_fork(None)\n",
        "",
        "launcher/test_odd_cells.py -k 'child_leaves'",
    ),
    Mutant(
        "odd cells: a fork that raises ends with code 0",
        "launcher/rank.py",
        "        status = 1\n    os._exit(status & 255)",
        "        status = 0\n    os._exit(status & 255)",
        "launcher/test_odd_cells.py -k status_of_its_end",
    ),
    Mutant(
        "odd cells: a fork prints again what the rank has printed",
        "launcher/rank.py",
        "os.register_at_fork(before=flush, after_in_child",
        "os.register_at_fork(after_in_child",
        "launcher/test_odd_cells.py -k child_leaves",
    ),
    Mutant(
        "odd cells: a fork keeps the channel open",
        "launcher/channel.py",
        "    forget = close  # in forks\n",
        "    def forget(self) -> None: ...\n",
        "launcher/test_odd_cells.py -k has_no_channel",
    ),
    Mutant(
        "odd cells: only an Exception of __str__ is caught",
        "launcher/cell.py",
        "    except BaseException as again:\n        if isinstance(again, KeyboardInterrupt):",
        "    except Exception as again:\n        if isinstance(again, KeyboardInterrupt):",
        "launcher/test_odd_cells.py -k odd_exception",
    ),
    Mutant(
        "odd cells: only an Exception of flush is caught",
        "launcher/rank.py",
        "with suppress(BaseException):\n            getattr(sys, name).flush()",
        "with suppress(Exception):\n            getattr(sys, name).flush()",
        "launcher/test_odd_cells.py -k output_stream",
    ),
    Mutant(
        "odd cells: every key of globals() is text",
        "launcher/rank.py",
        "for name, value in variables if isinstance(name, str)]",
        "for name, value in variables]",
        "launcher/test_odd_cells.py -k any_name_and_value",
    ),
    Mutant(
        "odd cells: text keeps a class that exists only on its rank",
        "launcher/cell.py",
        "    if isinstance(value, str):\n        return str.__str__(value)\n",
        "    if isinstance(value, str):\n        return value\n",
        "launcher/test_odd_cells.py -k do_not_travel",
    ),
    Mutant(
        "odd cells: the recursion limit of a cell stays",
        "launcher/rank.py",
        "sys.setrecursionlimit(max(sys.getrecursionlimit(), DEPTH))",
        "sys.setrecursionlimit(sys.getrecursionlimit())",
        "launcher/test_odd_cells.py -k lowest_recursion_limit",
    ),
    Mutant(
        "odd cells: a signal handler may raise between cells",
        "launcher/rank.py",
        "if self.rank.running is not None and not self.rank.rebuilding:",
        "if not self.rank.rebuilding:",
        "launcher/test_odd_cells.py -k raise_between_cells",
    ),
    Mutant(
        "odd cells: a signal handler may raise while groups are rebuilt",
        "launcher/rank.py",
        "if self.rank.running is not None and not self.rank.rebuilding:",
        "if self.rank.running is not None:",
        "launcher/test_odd_cells.py -k end_no_rebuild",
    ),
    # ---- forkserver and spawn ----
    Mutant(
        "forkserver: every child of the forkserver is a rank",
        "launcher/engines/forkserver.py",
        "            rank = pid in self.ranks\n",
        "            rank = True\n",
        "launcher/test_forkserver.py -k are_no_ranks",
    ),
    Mutant(
        "forkserver: a number that is no rank's any more is signalled",
        "launcher/engines/forkserver.py",
        "            if pid in self.ranks:  # not reaped yet",
        "            if pid:  # not reaped yet",
        "launcher/test_forkserver.py -k not_a_rank",
    ),
    Mutant(
        "forkserver: an ended rank is signalled after its number is free",
        "launcher/engines/forkserver.py",
        "                kill_group(pid, signal.SIGKILL)\n"
        "                end_children(kept=self.ranks, elsewhere=True)  # imports may start some in our session\n"
        "                self.ranks.discard(pid)\n"
        "            _, status = os.waitpid(pid, 0)\n"
        "            if rank:\n",
        "                end_children(kept=self.ranks, elsewhere=True)  # imports may start some in our session\n"
        "                self.ranks.discard(pid)\n"
        "            _, status = os.waitpid(pid, 0)\n"
        "            if rank:\n"
        "                kill_group(pid, signal.SIGKILL)\n",
        "launcher/test_forkserver.py -k signalled",
    ),
    Mutant(
        "forkserver: the end of a rank also ends what imports have started",
        "launcher/engines/forkserver.py",
        "end_children(kept=self.ranks, elsewhere=True)",
        "end_children(kept=self.ranks)",
        "launcher/test_forkserver.py -k are_no_ranks",
    ),
    Mutant(
        "forkserver: a fork that fails ends the forkserver",
        "launcher/engines/forkserver.py",
        "            except OSError as error:  # the limit on processes, or memory\n",
        "            except ValueError as error:  # the limit on processes, or memory\n",
        "launcher/test_forkserver.py -k fork_that_fails",
    ),
    Mutant(
        "forkserver: a rank that was not started never ends",
        "launcher/engines/fork.py",
        '            fork.on_exit(f"was not started: {why}")\n',
        "",
        "launcher/test_forkserver.py -k 'fork_that_fails or must_not_be_forked'",
    ),
    Mutant(
        "forkserver: a fork with two threads is safe",
        "launcher/engines/forkserver.py",
        'and a fork copies only one" if threads > 1 else',
        'and a fork copies only one" if threads > 2 else',
        "launcher/test_forkserver.py -k must_not_be_forked",
    ),
    Mutant(
        "forkserver: a rank whose forkserver has ended meanwhile lives on",
        "launcher/rank.py",
        "if os.getppid() != parent:",
        "if os.getppid() == 0:",
        "launcher/test_forkserver.py -k ended_meanwhile",
    ),
    Mutant(
        "wires: ranks have one byte",
        "launcher/wires.py",
        "self._tasks.put((task, rank))",
        "self._tasks.put((task, rank & 255 if rank >= 0 else rank))",
        "launcher/test_transfers.py -k above_255",
    ),
    Mutant(
        "wires: real-time signals have names",
        "launcher/wires.py",
        "    except ValueError:  # Python has names",
        "    except KeyError:  # Python has names",
        "recshard_lab/launcher/wires.py",
    ),
    Mutant(
        "wires: a start that fails keeps its descriptors",
        "launcher/wires.py",
        "self._thread.join(LEFT_S)\n        self.close()\n        self._wait_until_gone()",
        "self._thread.join(LEFT_S)\n        self._wait_until_gone()",
        "launcher/test_resources.py -k few_descriptors_names",
    ),
    Mutant(
        "spawn: a number that other code has reaped is signalled",
        "launcher/engines/spawn.py",
        "if not self._ended and self._unreaped():",
        "if not self._ended:",
        "launcher/test_spawn.py -k free_again",
    ),
    Mutant(
        "spawn: a rank adopts no orphans",
        "launcher/engines/spawn.py",
        "        adopt_orphans()\n        if listener",
        "        if listener",
        "launcher/test_spawn.py -k adopts",
    ),
    Mutant(
        "spawn: a rank that is killed leaves its daemons",
        "launcher/engines/spawn.py",
        "started = descendants(self.pid) if number == signal.SIGKILL else []",
        "started = []",
        "launcher/test_spawn.py -k killed_rank",
    ),
    Mutant(
        "spawn: interrupts reach a rank that starts",
        "launcher/engines/spawn.py",
        "        with _starting, _no_interrupt():\n",
        "        with _starting:\n",
        "launcher/test_spawn.py -k starting_rank",
    ),
    # ---- parity with plain torch ----
    Mutant(
        "parity: gradients are summed over ranks",
        "distributed/step/executor.py",
        "path.begin_backward(gradient, 1.0 / self.env.world_size, lookup_input)",
        "path.begin_backward(gradient, 1.0, lookup_input)",
        "benchmarks/test_parity.py -k ours_trains",
    ),
    Mutant(
        "parity: the mean of replicas is that of two",
        "distributed/state/replica_sync.py",
        "total.div_(len(terms))",
        "total.div_(2)",
        "distributed/test_limits.py -k three_replicas",
    ),
]
