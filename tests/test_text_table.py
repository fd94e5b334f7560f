"""Tables and answers as text and HTML."""

from IPython.lib.pretty import pretty

from recshard_lab.text_table import MOST_ROWS, WIDTH, Printable, TextTable


def test_lines_stay_within_the_width_and_html_has_the_full_cells_escaped() -> None:
    rows = [("a" * 60, "<&>", "b" * 60)]
    for table in (TextTable(("x", "y", "z"), rows, widest=(90, 5, 90)), TextTable(("x", "y", "z"), rows, wraps=True)):
        assert max(map(len, table.text.splitlines())) <= WIDTH
        assert f">{'a' * 60}<" in table.html
        assert "&lt;&amp;&gt;" in table.html
    short = TextTable(("x", "y", "z"), rows, widest=(90, 5, 90)).text
    assert short.count("…") == 1  # the first column alone gives way
    whole = TextTable(("x", "y", "z"), rows, wraps=True).text
    assert "".join(whole.split()).count("a") == whole.count("b") == 60
    assert len(TextTable(("x", "y", "z"), rows).text.splitlines()[1]) == 60 + 2 + 3 + 2 + 60


class Answer(Printable):
    def __init__(self, count: int) -> None:
        self.count = count

    def parts(self) -> list[str | TextTable]:
        table = TextTable(("n", "square"), [(str(n), str(n * n)) for n in range(self.count)], caption="Squares")
        return ["One.", "Two.", table, TextTable(("empty",), [], caption="Nothing"), "Three."]


def test_sentences_stand_together_tables_apart_and_empty_tables_are_left_out() -> None:
    assert str(Answer(1)) == "One.\nTwo.\n\nSquares\nn  square\n0  0\n\nThree."
    assert Answer(2)._repr_html_().count("<tr>") == 3
    assert pretty(Answer(1)) == str(Answer(1))
    assert "Nothing" not in Answer(1)._repr_html_()
    assert Answer(3).records()[2] == {"n": "2", "square": "4"}


def test_a_long_table_is_cut_in_text_alone() -> None:
    answer = Answer(MOST_ROWS + 2)
    assert "... and 2 more: records() has them all" in str(answer)
    assert f"\n{MOST_ROWS}  " not in str(answer)
    assert answer._repr_html_().count("<tr>") == MOST_ROWS + 3
