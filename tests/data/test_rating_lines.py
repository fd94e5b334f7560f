"""Ratings read by the piece are those read line by line, whatever stands in the lines."""

import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recshard_lab.data import MovieLens, formats, text_file
from recshard_lab.data.rating_lines import RatingLines
from recshard_lab.data.text_file import TextFile

STARS = {f"{halves / 2:g}": halves / 2 for halves in range(1, 11)}
MOVIES = {str(number): number // 3 for number in range(3, 60, 3)} | {"tt7": 99}

plain = st.tuples(
    st.integers(1, 40),
    st.sampled_from([int(own) for own in MOVIES if own.isdigit()]),
    st.sampled_from(list(STARS)),
    st.integers(0, 2**31),
).map(lambda row: "::".join(map(str, row)))
ODD = [
    *("u::3::4::5", "1::tt7::4::5", "01::3::4::5", "1::03::4::5", "1::3::4::-5", "1::3::4::1e3", "1::3::4", "1:3:4:5"),
    *("1::3::4::5::6", "1::2::4::5", "1::3::4.25::5", "1::3::.5::5", "1::3::4.::5", "1::3::4::", "1,3,4,5", "::::::"),
    *("1::3::4::05", "1::3::04::5", "1::3::4.0::5", "1.0::3::4::5", "1::3::4::5.0", "1::3::4::99999999999999999999"),
]
odd = st.one_of(st.sampled_from([*ODD, "", "1::3::4::5\r"]), st.text("0123456789:.,-e \r", max_size=20))


def by_hand(text: str) -> tuple[list[tuple[int, int, float, int]], int | None]:
    """(user, movie, stars, time) of each line up to the first that is wrong, and its number."""
    users: dict[str, int] = {}
    rows = []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        fields = line.rstrip("\r").split("::")
        try:
            user, movie, stars, time = fields
            assert int(time) < 2**63
            rows.append((users.setdefault(user, len(users)), MOVIES[movie], STARS[stars], int(time)))
        except (ValueError, KeyError, AssertionError):
            return rows, number
    return rows, None


@given(st.lists(st.one_of(plain, plain, plain, odd), min_size=1, max_size=30), st.integers(20, 200))
@settings(max_examples=300, deadline=None)
def test_pieces_are_read_as_lines_are(lines: list[str], piece: int) -> None:
    text = "\n".join(lines) + "\n"
    rows, wrong = by_hand(text)
    file = TextFile("ratings", lambda: io.BytesIO(text.encode()), "utf-8")
    patch = pytest.MonkeyPatch()
    patch.setattr(text_file, "_PIECE_BYTES", piece)
    try:
        if wrong is not None:
            with pytest.raises(ValueError, match=rf"^ratings, line {wrong}: "):
                RatingLines(file, "::", STARS, MOVIES, "movies").read()
            return
        found = RatingLines(file, "::", STARS, MOVIES, "movies").read()
    finally:
        patch.undo()
    told = zip(found.user.tolist(), found.movie.tolist(), found.rating.tolist(), found.timestamp.tolist(), strict=True)
    assert list(told) == rows


def test_plain_pieces_do_not_take_the_slow_way(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "userId,movieId,rating,timestamp\r\n" + "".join(f"{n % 7},3,4.5,{n}\r\n" for n in range(1000))
    file = TextFile("ratings", lambda: io.BytesIO(text.encode()), "utf-8")
    monkeypatch.setattr(RatingLines, "_read_lines", lambda *_: pytest.fail("read line by line"))
    found = RatingLines(file, ",", {"4.5": 4.5}, MOVIES, "movies").read()
    assert found.timestamp.tolist() == list(range(1000))
    assert found.user.tolist() == [n % 7 for n in range(1000)]


@pytest.mark.parametrize("variant", ["20m", "25m", "32m"])
def test_releases_of_one_layout_are_told_apart_by_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,1,4.0,7\n2,1,0.5,8\n")
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n1,Heat (1995),Action\n")
    assert MovieLens.load(tmp_path, variant=variant).source == f"MovieLens {variant.upper()}, 2 ratings"
    assert MovieLens.load(tmp_path).source == "MovieLens of another release, 2 ratings"
    monkeypatch.setitem(formats._PUBLISHED, 2, variant)
    assert MovieLens.load(tmp_path).source == f"MovieLens {variant.upper()}, 2 ratings"
    with pytest.raises(ValueError, match=rf"holds MovieLens {variant} \(2 ratings\), not variant 'latest-small'"):
        MovieLens.load(tmp_path, variant="latest-small")
