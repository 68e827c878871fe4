"""Console output: lines, tables, and text that is safe to print."""

from __future__ import annotations

import datetime
import io
import os
import re
import select
import sys

import tqdm

# Control characters except the newline; line separators and direction marks of Unicode; bytes that are not UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Returns a text in which control characters, except newlines, are backslash escapes.

    A file name or a class name may hold escape sequences, which a terminal would execute.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_name(name: str) -> str:
    """Returns `printable` of a name in one line: newlines are escaped, too."""
    return printable(name).replace("\n", "\\n")


class _Console(io.FileIO):
    """Standard output or error that discards what cannot be written, because its reader has gone or the disk is full.

    A program must not lose hours of work because a line about it cannot be printed.
    """

    def write(self, data: bytes) -> int:
        """Writes bytes, or discards them and everything after them."""
        try:
            while (count := super().write(data)) is None:  # A terminal that does not block, and is busy.
                select.select([], [self], [])
            return count
        except OSError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return len(data)


def set_up() -> None:
    """Makes standard output and error accept any text, and continue when they are closed; to be called first.

    A closed one is replaced by the null device. Otherwise its number would be given to the next file that is opened,
    and what native code prints would end up in that file. Characters that the encoding lacks are printed as escapes.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is not None and stream is not getattr(sys, f"__{name}__"):
            continue  # It is replaced, as by tests.
        if stream is not None and isinstance(getattr(stream.buffer, "raw", None), _Console):
            continue
        if stream is not None:
            stream.flush()
        encoding = "utf-8" if stream is None else stream.encoding
        console = io.TextIOWrapper(io.BufferedWriter(_Console(number, "wb", closefd=False)), encoding,
                                   "backslashreplace", line_buffering=True)
        setattr(sys, name, console)
        setattr(sys, f"__{name}__", console)


def log(text: str) -> None:
    """Prints a line on standard output, clear of any progress bar."""
    tqdm.tqdm.write(printable(text), file=sys.stdout)
    sys.stdout.flush()


def format_duration(seconds: float) -> str:
    """Returns seconds as h:mm:ss."""
    return str(datetime.timedelta(seconds=round(seconds)))


def format_table(title: str, rows: list[tuple[str, object] | None]) -> str:
    """Returns a two-column table as text; `rows` are (name, value) pairs, and None stands for a rule."""
    width = max(len(row[0]) for row in rows if row)
    length = max(len(title), max(width + 2 + len(str(row[1])) for row in rows if row))
    rule = "-" * length
    lines = [rule if row is None else f"{row[0]:<{width}}  {row[1]}" for row in rows]
    return "\n".join([rule, title, rule, *lines, rule])
