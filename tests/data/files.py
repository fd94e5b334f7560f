"""The same five ratings in every published layout, small enough to check by eye.

users   1: 24 M technician    2: 53 F writer
movies  1: Toy Story (1995), Animation + Comedy    2: no genre known or 'unknown'    3: Heat (1995), Action
"""

from collections.abc import Callable
from pathlib import Path

# fmt: off
GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama",
    "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)
# fmt: on
# user, movie, stars, timestamp
RATINGS = [(1, 1, 5, 300), (2, 1, 3, 100), (1, 3, 4, 200), (2, 2, 1, 500), (2, 3, 2, 400)]
CLICKS = [1.0, 0.0, 1.0, 0.0, 0.0]
USERS = [0, 1, 0, 1, 1]
MOVIES = [0, 0, 2, 1, 2]


def _flags(*genres: str) -> str:
    return "|".join("1" if genre in genres else "0" for genre in GENRES_100K)


def write_100k(folder: Path) -> None:
    lines = ["\t".join(map(str, row)) for row in RATINGS]
    (folder / "u.data").write_text("\n".join(lines) + "\n")
    (folder / "u.user").write_text("1|24|M|technician|85711\n2|53|F|writer|94043\n")
    items = [
        f"1|Toy Story (1995)|01-Jan-1995||http://us.imdb.com/?a|{_flags('Animation', 'Comedy')}",
        f"2|Misérables, Les|01-Jan-1995|||{_flags('unknown')}",
        f"3|Heat (1995)|01-Jan-1995|||{_flags('Action')}",
    ]
    (folder / "u.item").write_text("\n".join(items) + "\n", encoding="latin-1")


def write_1m(folder: Path) -> None:
    lines = ["::".join(map(str, row)) for row in RATINGS]
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n")
    (folder / "users.dat").write_text("1::M::18::17::48067\n2::F::50::20::70072\n")
    movies = "1::Toy Story (1995)::Animation|Comedy\n2::Misérables, Les::Drama\n3::Heat (1995)::Action\n"
    (folder / "movies.dat").write_text(movies, encoding="latin-1")


def write_10m(folder: Path) -> None:
    lines = [f"{user}::{movie}::{stars}::{time}" for user, movie, stars, time in RATINGS]
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n")
    movies = "1::Toy Story (1995)::Animation|Comedy\n2::Misérables, Les::(no genres listed)\n3::Heat (1995)::Action\n"
    (folder / "movies.dat").write_text(movies, encoding="utf-8")


def write_latest_small(folder: Path) -> None:
    lines = [f"{user},{movie},{stars}.0,{time}" for user, movie, stars, time in RATINGS]
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "\n".join(lines) + "\n")
    movies = '1,Toy Story (1995),Animation|Comedy\n2,"Misérables, Les",(no genres listed)\n3,Heat (1995),Action\n'
    (folder / "movies.csv").write_text("movieId,title,genres\n" + movies, encoding="utf-8")


def write_recbole(folder: Path) -> None:
    lines = ["\t".join(map(str, row)) for row in RATINGS]
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    (folder / "ml-100k.inter").write_text(header + "\n".join(lines) + "\n")
    header = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    (folder / "ml-100k.user").write_text(header + "1\t24\tM\ttechnician\t85711\n2\t53\tF\twriter\t94043\n")
    header = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    items = "1\tToy Story\t1995\tAnimation Comedy\n2\tMisérables, Les\t\tunknown\n3\tHeat\t1995\tAction\n"
    (folder / "ml-100k.item").write_text(header + items, encoding="utf-8")


WRITERS: dict[str, Callable[[Path], None]] = {
    "100k": write_100k,
    "1m": write_1m,
    "10m": write_10m,
    "latest-small": write_latest_small,
    "recbole": write_recbole,
}
