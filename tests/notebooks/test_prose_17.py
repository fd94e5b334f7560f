"""The prose of notebook 17 is what its cells print."""

from tests.notebooks.claims import stored

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


def test_an_evicted_row_is_lost_without_a_tier_and_comes_back_from_one() -> None:
    assert "An evicted row is lost, unless a tier keeps it" in DYNAMIC.prose("## 3.")
    assert DYNAMIC.cell("lab.guess(guess_alone").output.splitlines() == [
        "No guess yet. It is initial.",
        "No guess yet. It is trained.",
    ]


def test_a_delta_has_some_of_the_rows_and_loads_bit_for_bit() -> None:
    assert "A *delta* has only the rows that changed" in DYNAMIC.prose("`model.dump` writes")
    cell = DYNAMIC.cell("lab.guess(guess_delta")
    full, changed = cell.number(after="full dump:"), cell.number(after="Delta:")
    assert 0 < changed < full
    assert cell.number(after="It is") == round(100 * changed / full)
    assert "Rows equal, bit for bit: True" in DYNAMIC.output_of("alone.load(")


def test_answers_of_the_teachers_page() -> None:
    assert [DYNAMIC.cell("mine_a_lru").numbers, DYNAMIC.cell("mine_b").numbers] == [[5, 2], [1.531]]
    assert DYNAMIC.cell("mine_c").number("GB") == 28.6
