"""A text file read line by line that can refuse a line by file name and number."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import BinaryIO

Row = tuple[int, list[str]]  # line number from 1, fields
_PIECE_BYTES = 1 << 24


class TextFile:
    """One file of a release: its lines, and a refusal that names the line.

    Args:
        name: for refusals.
        open_file: opens it for reading bytes, as often as asked for.
        encoding: of its text.
    """

    def __init__(self, name: str, open_file: Callable[[], BinaryIO], encoding: str) -> None:
        self.name, self.open_file, self.encoding = name, open_file, encoding

    @cached_property
    def text(self) -> str:
        """All of it."""
        with self.open_file() as file:
            return self.decode(file.read(), 1)

    def decode(self, content: bytes, first: int) -> str:
        """Bytes that begin with line `first`, as text."""
        try:
            return content.decode(self.encoding)
        except UnicodeDecodeError as error:
            line = first + content.count(b"\n", 0, error.start)
            raise self.refusal(line, f"not {self.encoding} text ({error.reason})") from None

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """(number of the first line, whole lines) of a file that may be too large to be held whole."""
        first, rest = 1, b""
        with self.open_file() as file:
            while block := file.read(_PIECE_BYTES):
                lines, end, rest = (rest + block).rpartition(b"\n")
                if end:
                    yield first, lines + end
                    first += lines.count(b"\n") + 1
        if rest.strip():
            yield first, rest + b"\n"

    def refusal(self, line: int, reason: str) -> ValueError:
        return ValueError(f"{self.name}, line {line}: {reason}")

    def rows(self, separator: str, fields: int | None = None) -> Iterator[Row]:
        """(line number, fields) of every line; blank lines are refused except at the end."""
        if not self.text.strip():
            raise ValueError(f"{self.name} is empty")
        yield from self.rows_of(self.text.rstrip("\r\n"), 1, separator, fields)

    def rows_of(self, text: str, first: int, separator: str, fields: int | None) -> Iterator[Row]:
        """The same of lines that begin with line `first`."""
        for number, line in enumerate(text.removesuffix("\n").split("\n"), first):
            parts = line.rstrip("\r").split(separator)
            if fields is not None and len(parts) != fields:
                raise self.refusal(
                    number, f"expected {fields} fields separated by {separator!r}, got {len(parts)}: {line!r}"
                )
            yield number, parts

    def csv_rows(self, header: Sequence[str]) -> Iterator[Row]:
        """(line number, fields) of a comma separated file that begins with this header."""
        reader = csv.reader(io.StringIO(self.text), strict=True)
        try:
            first = next(reader, [])
            if first != list(header):
                raise self.refusal(1, f"expected the header {','.join(header)}, got {','.join(first)!r}")
            for row in reader:
                if len(row) != len(header):
                    raise self.refusal(reader.line_num, f"expected {len(header)} fields, got {len(row)}: {row!r}")
                yield reader.line_num, row
        except csv.Error as error:
            raise self.refusal(reader.line_num, str(error)) from None

    def typed_rows(self, wanted: Sequence[str]) -> Iterator[Row]:
        """(line number, the selected columns) under recbole's header of `name:type` columns."""
        rows = self.rows("\t")
        _, header = next(rows)
        columns = [column.split(":")[0] for column in header]
        missing = [name for name in wanted if name not in columns]
        if missing:
            raise self.refusal(1, f"the header lacks {', '.join(missing)}; it has {', '.join(header)}")
        picks = [columns.index(name) for name in wanted]
        for number, parts in rows:
            if len(parts) != len(columns):
                raise self.refusal(number, f"expected {len(columns)} tab separated fields, got {len(parts)}")
            yield number, [parts[pick] for pick in picks]

    def integer(self, line: int, what: str, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise self.refusal(line, f"{what} must be an integer, got {text!r}") from None
        if not -(2**63) <= number < 2**63:
            raise self.refusal(line, f"{what} must be an integer of 64 bits, got {text!r}")
        return number

    def known(self, line: int, what: str, key: str, rows: dict[str, int], where: str) -> int:
        row = rows.get(key)
        if row is None:
            raise self.refusal(line, f"{what} {key!r} is not in {where}")
        return row

    def stars(self, line: int, text: str, allowed: dict[str, float]) -> float:
        value = allowed.get(text)
        if value is None:
            raise self.refusal(line, f"rating must be one of {', '.join(allowed)}, got {text!r}")
        return value
