"""Tables and answers as text and HTML."""

from collections.abc import Iterator

import pytest
from IPython.lib.pretty import pretty

from recshard_lab.text_table import WIDTH, Printable, TextTable, line_width, set_terminal_width, wrapped


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


@pytest.fixture
def narrow() -> Iterator[int]:
    set_terminal_width(70)
    yield 70
    set_terminal_width(None)


def test_a_narrow_terminal_gets_short_lines_without_a_break_inside_a_word(narrow: int) -> None:
    words = "long-words_that_do_not_break " * 9
    rows = [("preset", "1,876 of 2,039 GB/s", words, "24.25 of 25 GB/s")] * 2
    table = TextTable(("name", "bandwidth", "about", "between hosts"), rows, caption=words)
    for text in (table.text, wrapped(words)):
        assert max(map(len, text.splitlines())) <= narrow == line_width()
        assert set(text.split()) <= {*words.split(), *" ".join([*table.heads, *rows[0]]).split()}
    assert max(map(len, TextTable(("x", "y"), [("a" * 60, "b" * 60)], widest=(60, 60)).text.splitlines())) <= narrow


def test_a_wide_terminal_changes_no_sentence_and_pipes_change_nothing() -> None:
    table = TextTable(("x", "y"), [("a " * 60, "b " * 60)])
    text = table.text
    set_terminal_width(300)
    try:
        assert line_width() == WIDTH
        assert table.text == text
    finally:
        set_terminal_width(None)
    assert max(map(len, text.splitlines())) > 200
