"""Console output: prints log lines, formats tables, and escapes control characters."""

from __future__ import annotations

import datetime
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence

import tqdm

# Matches control characters (except newlines), Unicode line separators, directional formatting
# characters, and surrogates, which stand for bytes that are not valid UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Replaces control characters, except newlines, with backslash escapes.

    File names and class names may contain escape sequences, which a terminal would interpret.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_name(name: str) -> str:
    """Replaces all control characters, including newlines, with backslash escapes (see `printable`)."""
    return printable(name).replace("\n", "\\n")


def set_up() -> None:
    """Makes standard output and standard error accept any text, even if they are closed. Call this function first.

    Closed descriptors are filled with the null device. Otherwise, the next file opened would reuse
    the descriptor, and native code would write its output to that file. Characters that the
    encoding does not support are printed as escapes.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # It was closed when Python started.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (open until exit)
        elif isinstance(stream, io.TextIOWrapper):  # Pytest's capturing replaces the stream.
            stream.reconfigure(errors="backslashreplace", line_buffering=True)


def log(text: str) -> None:
    """Prints a line to standard output, above any progress bar."""
    tqdm.tqdm.write(printable(text), file=sys.stdout)
    sys.stdout.flush()


def log_lines(lines: Iterable[str]) -> None:
    """Calls `log` for each line."""
    for line in lines:
        log(line)


def join_first(names: list[str], limit: int = 10) -> str:
    """Joins the first `limit` names with commas, and appends the number of remaining names."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def format_duration(seconds: float) -> str:
    """Formats a duration as h:mm:ss."""
    return str(datetime.timedelta(seconds=round(seconds)))


def format_end(seconds: float) -> str:
    """Formats the time in `seconds` from now, and the duration."""
    end = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
    return f"{end:%Y-%m-%d %H:%M} (in {format_duration(seconds)})"


def format_table(title: str, rows: Sequence[tuple[str, object] | None]) -> str:
    """Formats a two-column table. Each row is a (name, value) pair, or None for a horizontal rule."""
    width = max(len(row[0]) for row in rows if row)
    lines = [row and f"{row[0]:<{width}}  {row[1]}" for row in rows]
    rule = "-" * max(map(len, [title, *filter(None, lines)]))
    return "\n".join([rule, title, rule, *(line or rule for line in lines), rule])
