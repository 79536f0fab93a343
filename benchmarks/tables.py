"""Rows as a table: for a terminal while they come, and for a page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
MISSING = "-"


def cell(row: Row, name: str, style: str) -> str:
    """One value as its column has it.

    Example:
        >>> cell({"rate": 1234.5}, "rate", ",.0f"), cell({"rate": None}, "rate", ",.0f")
        ('1,234', '-')
    """
    value = row.get(name)
    if value is None or value != value:
        return MISSING
    return format(value, style)


def title(name: str) -> str:
    """The head of a column.

    Example:
        >>> title("samples_per_s"), title("startup_s"), title("sent_kb_per_step")
        ('samples/s', 'startup s', 'sent KB/step')
    """
    return name.replace("_per_", "/").replace("_kb", " KB").replace("_", " ")


class Lines:
    """The lines of a table, each as wide as its head and what is usual.

    Args:
        columns: Names and formats, as of a result.
        least: Characters of a number's column.
    """

    def __init__(self, columns: Mapping[str, str], least: int = 10) -> None:
        self._columns = columns
        self._widths = {c: max(len(title(c)) + 1, least) for c in columns}
        first = next(iter(columns))
        self._widths[first] = max(self._widths[first], 34)

    def head(self) -> str:
        return self._line({name: title(name) for name in self._columns})

    def row(self, row: Row) -> str:
        return self._line({n: cell(row, n, s) for n, s in self._columns.items()})

    def _line(self, cells: Mapping[str, str]) -> str:
        first, *others = cells
        parts = [f"{cells[first]:<{self._widths[first]}}"]
        parts += [f"{cells[name]:>{self._widths[name]}}" for name in others]
        return " ".join(parts).rstrip()


def markdown(columns: Mapping[str, str], rows: Sequence[Row]) -> Iterator[str]:
    """The lines of a Markdown table; a bar in a text is escaped."""
    yield "| " + " | ".join(title(name) for name in columns) + " |"
    yield "|" + "|".join("---" for _ in columns) + "|"
    for row in rows:
        cells = [cell(row, name, style) for name, style in columns.items()]
        yield "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"
