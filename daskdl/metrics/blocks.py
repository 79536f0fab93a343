"""What a report is made of, and how that is written as text and as HTML. No torch."""

import html
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_STYLE = "text-align: right"


class Heading(NamedTuple):
    """The title of a section."""

    text: str


class Facts(NamedTuple):
    """Single numbers, each with its name."""

    rows: Sequence[tuple[str, str]]


class Table(NamedTuple):
    """Columns of numbers, right-aligned; the first cell of a row is its name."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Note(NamedTuple):
    """A sentence."""

    text: str


Block = Heading | Facts | Table | Note


def decimals(value: float) -> str:
    """A number with 4 decimals; "-" for one that is not defined.

    Large and tiny ones have 4 digits after the first instead.

    Example:
        >>> decimals(0.5), decimals(float("nan")), decimals(1e-7), decimals(123456.0)
        ('0.5000', '-', '1.0000e-07', '123456.0000')
    """
    if math.isnan(value):
        return "-"
    size = abs(value)
    return f"{value:.4f}" if size == 0 or 1e-3 <= size < 1e6 else f"{value:.4e}"


def as_text(blocks: Iterable[Block]) -> str:
    """Write a report for a terminal.

    Example:
        >>> print(as_text([Heading("Errors"), Facts([("MSE", "0.5000")])]))
        Errors
        <BLANKLINE>
        MSE  0.5000
    """
    return "\n\n".join(_text_of(block) for block in blocks)


def as_html(blocks: Iterable[Block]) -> str:
    """Write a report for a notebook; every name is escaped.

    Example:
        >>> as_html([Note("<b>")])
        '<div><p>&lt;b&gt;</p></div>'
    """
    return f"<div>{''.join(_html_of(block) for block in blocks)}</div>"


def _text_of(block: Block) -> str:
    if isinstance(block, Heading | Note):
        return _one_line(block.text)
    if isinstance(block, Facts):
        return _aligned(block.rows)
    return _aligned([block.columns, *block.rows])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Cells below each other: the first of a row to the left, others to the right."""
    lines = [[_one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        [name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]
        for name, *cells in lines
    )
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _one_line(text: str) -> str:
    """Without line breaks, tabs and what a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _html_of(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h4>{html.escape(block.text)}</h4>"
    if isinstance(block, Note):
        return f"<p>{html.escape(block.text)}</p>"
    if isinstance(block, Facts):
        return f"<table>{_html_rows(block.rows)}</table>"
    head = "".join(f'<th style="{_STYLE}">{html.escape(c)}</th>' for c in block.columns)
    return f"<table><tr>{head}</tr>{_html_rows(block.rows)}</table>"


def _html_rows(rows: Sequence[Sequence[str]]) -> str:
    return "".join(
        f"<tr><th>{html.escape(name)}</th>"
        + "".join(f'<td style="{_STYLE}">{html.escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for name, *cells in rows
    )
