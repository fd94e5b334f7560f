"""The prose of notebook 19 is what its cells print."""

from tests.notebooks.claims import stored

RETRIEVAL = stored("19")


def test_popularity_is_strong_and_the_correction_is_needed() -> None:
    prose = RETRIEVAL.prose("Popularity is a strong guess.")
    assert "Without the correction, popular movies get low scores" in prose
    cell = RETRIEVAL.cell("lab.guess(guess_popular")
    popular, plain, corrected, random = *cell.numbers[:3], cell.number(after="100 random movies:")
    assert random < plain < popular < corrected
    assert "Best with 100 candidates: towers, corrected" in cell.output


def test_ivf_is_faster_than_the_exact_search_at_95_percent() -> None:
    assert "The catalogue below has 30,000 items" in RETRIEVAL.prose("## 2. An index")
    cell = RETRIEVAL.cell("lab.guess(guess_faster")
    assert cell.number("times") > 1
    assert cell.line("exact").split()[2] == "1.000"


def test_ranking_takes_longest_and_the_server_gives_the_bundles_answers() -> None:
    assert "The ranking model computes 100 samples for one user." in RETRIEVAL.prose("Fewer candidates")
    assert RETRIEVAL.output_of("lab.guess(guess_stage").startswith("No guess yet. It is rank.")
    assert RETRIEVAL.output_of("alone = ").endswith("True\n")


def test_answers_of_the_teachers_page() -> None:
    assert RETRIEVAL.cell("mine_a").number("MB") == 10e6 * 4 * 32 / 1e6
    assert RETRIEVAL.cell("mine_b").number("candidates") == 400
    assert "the new movie is nearest of user 42: True" in RETRIEVAL.output_of("mine_c")
