"""The prose of notebook 05 is what its cells print."""

from tests.notebooks.claims import stored

RANKS = stored("05")


def test_the_rank_that_waits_least_is_the_slow_one() -> None:
    cell = RANKS.cell("waited least")
    waited = [cell.row(f"rank {rank} waited")[0] for rank in range(4)]
    assert "0.06 if rank == 2 else 0.02" in RANKS.cell("log.stage").source  # "three times as long"
    assert min(range(4), key=waited.__getitem__) == 2
    assert "Rank 2 waited least." in cell.output
    assert "Rank 2 works three times as long as the others." in RANKS.prose("1. One slow rank")


def test_no_rank_sees_a_variable_of_another_rank() -> None:
    assert RANKS.cell("x = x + 1").row("x[0] on each rank:") == [0, 1, 3, 3]


def test_all_to_all_transposes() -> None:
    assert RANKS.output_of('received.tolist()")').count("[2, 12, 22, 32]") == 1
    assert "One solution: [2, 12, 22, 32]" in RANKS.output_of("mine_a")


def test_short_messages_cost_their_latency() -> None:
    summary = RANKS.cell("views.curves")
    assert summary.number(after="Short messages: 64 times the bytes take") < summary.number(
        after="Long messages: 64 times the bytes take"
    )
    many, one = RANKS.cell("64 messages of").number(after="1,024 bytes:"), RANKS.cell("64 messages of").numbers[-1]
    assert many > one


def test_a_step_has_four_exchanges_with_two_tables_and_with_three() -> None:
    assert RANKS.cell("two if rank == 0").output.count("all_to_all") == 4
    assert RANKS.prose("Four exchanges").startswith("Four exchanges:")
    assert RANKS.cell('ops.count("all_to_all")').number(after="It is") == 4


def test_the_missing_rank_of_the_hang_is_named_and_variables_are_kept() -> None:
    hang = RANKS.cell("a GPU waits here").output
    assert "rank 2 never entered all_reduce" in hang
    assert "variables on the ranks are kept" in hang
    assert "caused by ranks [1] - ZeroDivisionError" in RANKS.cell("except rs.RankError").output
    assert "rank 3 was killed by SIGKILL" in RANKS.cell("except rs.LaunchError").output


def test_one_message_saves_nine_latencies() -> None:
    assert RANKS.cell("mine_d").number("ms") == 2.7
