"""A question that a module of this folder answers, and its command.

Each such module has one, ``QUESTION``: the options of its command, the rows that it
measures, and how they are written. The table and the JSON file are made here, alike for
all; the picture, with the page, by `benchmarks.report`.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, Result
from benchmarks.tables import Lines


@dataclass(frozen=True)
class Question:
    """How a question is asked, and how the answer is shown.

    Attributes:
        name: As `python -m benchmarks` knows it.
        text: The question, what is counted, and the baseline.
        options: Adds the options of the command to a parser.
        rows: Measures: each row as soon as it is known, a mapping or a dataclass. The
            notes of the result may be added to ``arguments.notes`` meanwhile.
        columns: What is shown of a row, and the format of each.
        plot: Makes a picture of the result.
    """

    name: str
    text: str
    options: Callable[[argparse.ArgumentParser], Any]
    rows: Callable[[argparse.Namespace], Iterable[Any]]
    columns: Mapping[str, str]
    plot: Callable[[Result], Any]

    def main(self, arguments: Sequence[str] | None = None) -> Result:
        """Ask it: print the table, and write the JSON file.

        What is known by then is in a file beside, named ``.part``, if it ends early.

        Args:
            arguments: Of the command; None: those of this process.
        """
        arguments = sys.argv[1:] if arguments is None else list(arguments)
        asked = self.parser().parse_args(arguments)
        asked.notes = []
        command = shlex.join(["python", "-m", "benchmarks", self.name, *arguments])
        print(f"# {command}", flush=True)
        seeds = getattr(asked, "seeds", [0])
        result = Result(self.name, self.columns, [], command, seeds)
        lines = Lines(self.columns)
        print(lines.head(), flush=True)
        for row in self.rows(asked):
            found = asdict(row) if is_dataclass(row) else row
            print(lines.row(found), flush=True)
            rows = [*result.rows, found]
            result = replace(result, rows=rows, notes=asked.notes)
            if asked.results is not None:
                result.save_part(asked.results)
        if asked.results is not None and result.rows:
            path = result.save(asked.results)
            print(f"# written: {path}")
        return result

    def parser(self) -> argparse.ArgumentParser:
        """Of the options, those of all questions included."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks {self.name}",
            description=self.text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.options(parser)
        parser.add_argument(
            "--results",
            type=Path,
            default=FOLDER,
            metavar="FOLDER",
            help="where the JSON file is written (%(default)s)",
        )
        parser.add_argument(
            "--no-results",
            dest="results",
            action="store_const",
            const=None,
            help="write nothing",
        )
        return parser
