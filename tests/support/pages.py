"""Pages of the documentation: their code, and the output that they show for it."""

import ast
import re
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

FENCED = re.compile(r"^``` ?(?P<info>\S[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)
INCLUDED = re.compile(r'^--8<-- "(?P<file>[^":]+)(?::(?P<section>\w+))?"$', re.M)
# Also what is shown for a number that does not exist.
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?|(?<=\s)-(?=\s)|\bnan\b")


class Code(NamedTuple):
    """A block of Python code on a page."""

    text: str  # with the included file in place of its name
    file: str  # included file, relative to the root; empty without one
    is_run: bool  # on the page, by `tests/examples`
    output: str | None  # text block that comes next, before any other block


def expanded(text: str) -> str:
    """Return a block with the files or sections that it includes."""

    def content(match: re.Match[str]) -> str:
        file = (ROOT / match["file"]).read_text()
        if match["section"] is None:
            return file
        _, _, after = file.partition(f"# --8<-- [start:{match['section']}]\n")
        return after.partition(f"# --8<-- [end:{match['section']}]\n")[0]

    return INCLUDED.sub(content, text)


def code_of(page: Path) -> list[Code]:
    """Return the blocks of Python code of a page."""
    blocks = [
        (re.search(r"\w+", match["info"])[0], match)
        for match in FENCED.finditer(page.read_text())
    ]
    return [
        Code(
            text=expanded(block["text"]),
            file=match["file"] if (match := INCLUDED.search(block["text"])) else "",
            is_run=block["info"] == "python",
            output=following["text"] if kind == "text" else None,
        )
        for (language, block), (kind, following) in pairwise([*blocks, ("", None)])
        if language == "python"
    ]


def prints(code: str) -> bool:
    """Whether code calls `print`."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        for node in ast.walk(ast.parse(code))
    )


def alike(shown: str, printed: str) -> bool:
    """Whether a program printed what a page shows, up to numbers and white space.

    On the page, ``...`` stands for any text.
    """
    # NumPy pads shorter numbers of an array: "[0.938 0.96 ]".
    shown, printed = (
        re.sub(r"(?<=\[)\s+|\s+(?=\])", "", NUMBER.sub("0", text))
        for text in (shown, printed)
    )
    return OutputChecker().check_output(shown, printed, ELLIPSIS | NORMALIZE_WHITESPACE)
