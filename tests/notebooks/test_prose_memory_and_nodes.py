"""The prose of notebooks 08 and 10 is what their cells print."""

from tests.notebooks.claims import stored

MEMORY, NODES = stored("08"), stored("10")


def test_rank_0_is_the_one_that_does_not_fit_and_one_table_is_the_fix() -> None:
    figure = MEMORY.cell("views.overflow").output
    assert "Rank 0 is the first that does not fit" in figure
    assert "Fix: table 'studios' row_wise instead of table_wise" in figure
    assert "It does not change any number that the model computes." in MEMORY.prose("The view answers")


def test_weights_of_rank_0_are_those_of_two_tables() -> None:
    assert MEMORY.cell('["weights"] / 1e6').number("MB") == (400_000 + 150_000) * 64 * 4 / 1e6


def test_the_model_is_built_and_the_step_runs_out_on_rank_0() -> None:
    raised = MEMORY.cell("except rs.RankError").output
    assert raised.startswith("The model is built.\ntrain_step: rank 0 raised OutOfMemoryError")
    assert "and were freed" in raised
    assert "The tables fit, so the model is built." in MEMORY.prose("The message has the rank")
    assert "One step is done on every rank." in MEMORY.cell('{"plan": moved}').output


def test_only_the_plan_as_dealt_does_not_fit_among_the_changes() -> None:
    lines = MEMORY.output_of("for words, plan in changes.items()").splitlines()
    assert [line.endswith("does not fit") for line in lines] == [True, False, False, False]
    assert "Other one-table changes also fit." in MEMORY.prose("Here are three")


def test_the_step_adds_to_what_stays_and_measured_is_above_predicted() -> None:
    stays, more = MEMORY.cell("stays / 1e6").row("At the peak")
    assert stays > more > 0
    figure = MEMORY.cell("measured, topology=cap").output
    totals = [
        float(row.split()[-4])
        for row in figure.splitlines()
        if row.split()[:2] in (["0", "predicted"], ["0", "measured"])
    ]
    assert totals[0] < totals[1]


def test_not_every_lever_is_enough_and_a_cache_moves_bytes_to_the_host() -> None:
    levers = MEMORY.cell("for words, setting in levers.items()")
    assert [name for name in ("SGD", "half the batch") if levers.line(name).endswith("does not fit")] == [
        "SGD",
        "half the batch",
    ]
    assert levers.line("FP16").endswith("  fits")
    assert "so a smaller batch or a smaller optimizer state helps little" in MEMORY.prose("Not every lever")
    in_gpu, below = MEMORY.output_of("all in GPU memory").splitlines()
    assert "movies in host memory" in below
    assert in_gpu.split("GPU")[2] > below.split("GPU")[1]  # fewer MB in the GPU


def test_two_thirds_of_row_wise_bytes_cross_and_table_row_wise_sends_half_of_them() -> None:
    assert "67%" in NODES.cell("by_rows = rs.estimate").output
    assert "two thirds of all bytes use the slow link" in NODES.prose("Two of its three peers")
    assert abs(NODES.cell('crossing("table_row_wise")').number("%") - 50) < 3


def test_two_hop_halves_messages_and_bytes() -> None:
    direct, two_hop = (NODES.cell("counted = {}").row(path) for path in ("direct", "two_hop"))
    assert direct[0] == 2 * two_hop[0]
    assert abs(direct[1] - 2 * two_hop[1]) < 0.02
    assert "in half as many messages with half of the bytes" in NODES.prose("The rows of both nodes")


def test_a_step_of_replicas_crosses_no_link() -> None:
    counted = NODES.cell('("step", "sync")')
    assert counted.row("step:") == [0.0]
    assert counted.row("sync:")[0] > 0
    assert "A step crosses no link" in NODES.prose("sends the weights once around")
