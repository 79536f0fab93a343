"""The tables of docs/benchmarks.md, from the newest results.

A page has places for them, between two comments that name the question:

    <!-- results: links -->
    <!-- end of results: links -->

What is between them is replaced, if that question has results; all else stays as it is.

Run:      python -m benchmarks report
"""

import argparse
import importlib
import re
from pathlib import Path

from benchmarks import plots
from benchmarks.__main__ import QUESTIONS
from benchmarks.machine import ROOT
from benchmarks.results import FOLDER, Result, load, newest
from benchmarks.tables import markdown

PAGE = ROOT / "docs" / "benchmarks.md"
PLACE = "<!-- results: {0} -->\n(?:.*?\n)??<!-- end of results: {0} -->"


def section(result: Result, picture: str | None) -> str:
    """What stands between the comments of a question."""
    lines = [f"`{result.command}`, {result.date}, {_made_on(result)}.", ""]
    lines += [f"- {note}" for note in result.notes]
    lines += [""] * bool(result.notes)
    lines += markdown(result.columns, result.rows)
    if picture is not None:
        lines += ["", f"![{result.question}]({picture})"]
    return "\n".join(lines)


def _made_on(result: Result) -> str:
    hardware, versions = result.hardware, result.versions
    shown = ("torch", "distributed", "numba")
    libraries = [f"{name} {versions[name]}" for name in shown if name in versions]
    return ", ".join(
        [
            f"{hardware['processor']}, {hardware['cores']} cores",
            f"Python {versions['python']}",
            *libraries,
            f"commit {result.commit or 'unknown'}",
            f"seeds {', '.join(map(str, result.seeds))}",
        ]
    )


def render(page: str, sections: dict[str, str]) -> str:
    """A page with these sections in their places.

    Raises:
        ValueError: If a question has no place there.

    Example:
        >>> empty = "# A\\n<!-- results: x -->\\n<!-- end of results: x -->\\n"
        >>> print(render(empty, {"x": "new"}), end="")
        # A
        <!-- results: x -->
        new
        <!-- end of results: x -->
    """
    for name, text in sections.items():
        whole = f"<!-- results: {name} -->\n{text}\n<!-- end of results: {name} -->"
        place = re.compile(PLACE.format(re.escape(name)), re.DOTALL)
        page, found = place.subn(lambda _, whole=whole: whole, page)
        if found != 1:
            raise ValueError(
                f"the page has {found} places for {name!r}, it has to be one: "
                f"<!-- results: {name} --> and <!-- end of results: {name} -->"
            )
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=FOLDER, metavar="FOLDER")
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args()
    sections = {}
    for name, path in newest(asked.results).items():
        if name in QUESTIONS:
            result = load(path)
            question = importlib.import_module(f"benchmarks.{QUESTIONS[name]}").QUESTION
            picture = f"images/benchmark_{name}.png"
            plots.draw(result, question.plot, asked.page.parent / picture)
            sections[name] = section(result, picture)
            print(f"{name}: {path}")
    asked.page.write_text(render(asked.page.read_text(), sections))


if __name__ == "__main__":
    main()
