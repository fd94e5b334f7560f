"""The prose of notebooks 00, 05, 08, 10 and 15 to 20 is what their cells print."""

import re

import recshard_lab as rs
from recshard_lab.compat import coverage
from tests.notebooks.claims import stored

INDEX = stored("00")


def test_mlperfs_tables_need_more_than_one_gpu_and_fit_on_eight() -> None:
    assert "has 26 such tables" in INDEX.prose("A guess first")
    figure = INDEX.cell("views.placement").output
    assert "Placement: 26 tables on 8 ranks." in figure
    one, eight = INDEX.output_of("plan_of_scheme").splitlines()
    assert "DOES NOT FIT" in one
    assert "eight GPUs: fits" in eight
    assert "Eight GPUs together have room." in INDEX.prose("Eight GPUs")


def test_the_guess_and_the_exercise_are_of_these_tables() -> None:
    weights_gb = sum(table.weight_bytes for table in rs.planner.mlperf_dlrm_dcnv2_tables()) / 1e9
    assert INDEX.cell("lab.guess").number("GB") == round(weights_gb, 1)
    assert INDEX.cell("lab.check").number("GPUs") == 3
    assert 2 * weights_gb / 70 < 3 < 2 * weights_gb / 70 + 1


RANKS = stored("05")


def test_the_rank_that_waits_least_is_the_slow_one() -> None:
    cell = RANKS.cell("waited least")
    waited = [cell.row(f"rank {rank} waited")[0] for rank in range(4)]
    assert "0.06 if rank == 2 else 0.02" in RANKS.cell("log.stage").source  # "three times as long"
    assert min(range(4), key=waited.__getitem__) == 2
    assert "Rank 2 waited least." in cell.output
    assert "Rank 2 works three times as long as the others." in RANKS.prose("1. One slow rank")


def test_the_missing_rank_of_the_hang_is_named_and_variables_are_kept() -> None:
    hang = RANKS.cell("a GPU waits here").output
    assert "rank 2 never entered all_reduce" in hang
    assert "variables on the ranks are kept" in hang
    assert "caused by ranks [1] - ZeroDivisionError" in RANKS.cell("except rs.RankError").output
    assert "rank 3 was killed by SIGKILL" in RANKS.cell("except rs.LaunchError").output


DYNAMIC = stored("17")


def test_three_ids_give_two_rows_and_evaluation_inserts_none() -> None:
    assert "This batch has three ids." in DYNAMIC.prose("## 1. An id gets a row")
    assert DYNAMIC.cell("lab.guess(guess_rows").number("rows") == 2
    evaluated = DYNAMIC.cell("unknown = torch.tensor([42])").output
    assert "has a row: False" in evaluated
    assert "the same initial row in another table of this name: True" in evaluated


def test_a_policy_that_keeps_frequent_users_finds_more_ids_than_lru() -> None:
    assert "A policy that keeps frequent users finds their ids again." in DYNAMIC.prose("Most users are rare.")
    cell = DYNAMIC.cell("lab.guess(guess_lru")
    lru, lfu, admitted = (cell.number(after=f"{name}:") for name in ("lru", "lfu", "lru, admit=2"))
    unlimited = cell.number(after="no limit:")
    assert cell.number(after="It is") == lru < min(lfu, admitted) < max(lfu, admitted) < unlimited
    best = DYNAMIC.cell("best = max(limited").output
    assert f"lru {lru}%." in best


def test_a_delta_has_some_of_the_rows_and_loads_bit_for_bit() -> None:
    assert "A *delta* has only the rows that changed" in DYNAMIC.prose("`model.dump` writes")
    cell = DYNAMIC.cell("lab.guess(guess_delta")
    full, changed = cell.number(after="full dump:"), cell.number(after="Delta:")
    assert 0 < changed < full
    assert cell.number(after="It is") == round(100 * changed / full)
    assert "Rows equal, bit for bit: True" in DYNAMIC.output_of("alone.load(")


SERVING = stored("18")


def test_int8_rows_of_16_columns_have_20_of_64_bytes() -> None:
    assert "Rows have 16 columns." in SERVING.prose("## 1. Smaller rows")
    assert SERVING.cell("lab.guess(guess_share").number(after="It is") == 100 * (16 + 4) / (4 * 16)


def test_a_bundle_answers_without_this_library() -> None:
    assert "A bundle answers without this library." in SERVING.prose("rs.serving.load_bundle")
    cell = SERVING.cell("lab.guess(guess_imports")
    assert cell.number(after="It is") == 2
    assert "['fbgemm_gpu', 'torch']" in cell.output
    answer = SERVING.cell("server.client().predict(")
    assert answer.number(after="answer") == answer.number(after="the model in this notebook")


RETRIEVAL = stored("19")


def test_ivf_is_faster_than_the_exact_search_at_95_percent() -> None:
    assert "The catalogue below has 30,000 items" in RETRIEVAL.prose("## 2. An index")
    cell = RETRIEVAL.cell("lab.guess(guess_faster")
    assert cell.number("times") > 1
    assert cell.line("exact").split()[2] == "1.000"


def test_ranking_takes_longest_and_the_server_gives_the_bundles_answers() -> None:
    assert "The ranking model computes 100 samples for one user." in RETRIEVAL.prose("Fewer candidates")
    assert RETRIEVAL.output_of("lab.guess(guess_stage").startswith("No guess yet. It is rank.")
    assert RETRIEVAL.output_of("alone = ").endswith("True\n")


TORCHREC = stored("20")


def test_the_classes_are_this_librarys_and_the_served_share_is_computed() -> None:
    assert "It refuses where TorchRec is installed." in TORCHREC.prose("## 1. The import")
    assert "the same class: True" in TORCHREC.output_of("print(KeyedJaggedTensor)")
    served = sum(len(module.served) for module in coverage())
    known = served + sum(len(module.missing) for module in coverage())
    cell = TORCHREC.cell("lab.guess(guess_served")
    assert f"{served} of {known} names" in cell.output
    assert cell.number(after="It is") == round(100 * served / known)


def test_the_script_ran_on_two_ranks_without_a_line_for_this_library() -> None:
    assert "It has no line for this library." in TORCHREC.prose("## 2. A script")
    assert TORCHREC.output_of("command = [").startswith("2 ranks, 40 steps, recshard_lab.distributed")
    written = [c.source for c in TORCHREC.notebook.cells if c.source.startswith("%%writefile")]
    assert len(written) == 3
    assert not any("recshard" in source for source in written)


def test_the_report_lists_the_names_of_the_script_and_plans_its_table() -> None:
    cell = TORCHREC.cell("compat.read_script(")
    counts = [int(number) for number in re.findall(r"(\d+) (?:are|differ)", cell.output)]
    assert cell.number(after="It is") == sum(counts) > 5
    assert "are served" in cell.output
    plan = TORCHREC.output_of("report.plan(4)")
    assert "film" in plan
    assert "python -m recshard_lab.compat --translate train.py" in plan


PIPELINE, OUT = stored("15"), stored("16")


def test_three_of_four_pipelines_have_the_losses_of_the_plain_loop() -> None:
    told = PIPELINE.cell("sum(one == losses")
    assert told.number(after="It is") == 3
    assert [line.split()[0] for line in told.output.splitlines() if "other losses" in line] == ["semi_sync"]
    assert "so it trains another model" in PIPELINE.prose("A pipeline that only moves messages")


def test_one_sum_however_the_script_is_started() -> None:
    cells = ('terminal(sys.executable, "films.py")', '_ = ranks.exec(Path("films.py")')
    lines = [line for words in cells for line in OUT.output_of(words).splitlines()]
    sums = {line.rpartition(": ")[2] for line in lines if ": -" in line or ": 0" in line}
    assert len(sums) == 1
    assert "changes nothing that is computed" in OUT.prose("The script contains no number of ranks")


def test_it_resumes_at_a_multiple_of_20_with_the_weights_of_a_run_that_was_never_killed() -> None:
    killed = OUT.cell("process.kill()").number(after="step")
    resumed = OUT.cell('after[0]["step"] - 20').number(after="It is")
    assert killed >= 60
    assert resumed in (killed, killed - 20)
    assert resumed % 20 == 0
    assert OUT.cell("apart = max(").number(after="largest difference of a weight") == 0
    assert "bit for bit" in OUT.output_of("apart = max(")


MEMORY, NODES = stored("08"), stored("10")


def test_rank_0_is_the_one_that_does_not_fit_and_one_table_is_the_fix() -> None:
    figure = MEMORY.cell("views.overflow").output
    assert "Rank 0 is the first that does not fit" in figure
    assert "Fix: table 'studios' row_wise instead of table_wise" in figure
    assert "It does not change any number that the model computes." in MEMORY.prose("The view answers")


def test_the_model_is_built_and_the_step_runs_out_on_rank_0() -> None:
    raised = MEMORY.cell("except rs.RankError").output
    assert raised.startswith("The model is built.\ntrain_step: rank 0 raised OutOfMemoryError")
    assert "and were freed" in raised
    assert "The tables fit, so the model is built." in MEMORY.prose("The message has the rank")
    assert "One step is done on every rank." in MEMORY.cell('{"plan": moved}').output


def test_two_thirds_of_row_wise_bytes_cross_and_table_row_wise_sends_half_of_them() -> None:
    assert "67%" in NODES.cell("by_rows = rs.estimate").output
    assert "two thirds of all bytes use the slow link" in NODES.prose("Two of its three peers")
    assert abs(NODES.cell('crossing("table_row_wise")').number("%") - 50) < 3


def test_two_hop_halves_messages_and_bytes() -> None:
    direct, two_hop = (NODES.cell("counted = {}").row(path) for path in ("direct", "two_hop"))
    assert direct[0] == 2 * two_hop[0]
    assert abs(direct[1] - 2 * two_hop[1]) < 0.02
    assert "in half as many messages with half of the bytes" in NODES.prose("The rows of both nodes")
