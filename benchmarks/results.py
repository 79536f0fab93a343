"""Questions, the results that they write, and the machine that they were measured on.

A result is one JSON file for each run of a question: rows, columns, hardware, versions,
commit, seeds and command, which is all that is needed to render it and to repeat it.
"""

import argparse
import datetime
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "dask", "distributed", "numpy", "numba", "lz4")


def hardware_here() -> dict[str, object]:
    """The processor, its cores that may be used, and the memory."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def processor() -> str:
    """As the system calls it."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def slug(found: dict[str, object]) -> str:
    """Hardware as a part of a file name.

    Example:
        >>> slug({"processor": "Intel(R) Xeon(R) Processor @ 2.50GHz", "cores": 2})
        'xeon-2.50ghz-2cores'
    """
    words = re.sub(r"\(.*?\)", " ", str(found["processor"])).lower()
    words = re.sub(r"\b(intel|amd|cpu|processor)\b|@", " ", words)
    kept = re.findall(r"[a-z0-9.]+", words)
    return "-".join([*kept[:4], f"{found['cores']}cores"])


def versions_here(more: tuple[str, ...] = ()) -> dict[str, str]:
    """Of Python and of the libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in (*LIBRARIES, *more):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit_of_checkout() -> str | None:
    """Of this checkout, with a plus if files have changed; None outside of one."""
    try:
        number = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return number + "+" * bool(changed)


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


FOLDER = Path(__file__).parent / "results"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """What one run of a question found."""

    question: str  # its name, as `python -m benchmarks` knows it
    columns: Mapping[str, str]  # name of each column that is shown, and its format
    rows: Sequence[Row]  # A mapping each, with more than is shown
    command: str  # that made it
    seeds: Sequence[int] = (0,)  # of all that is random
    # what a reader has to know, such as a link that was not to be had
    notes: Sequence[str] = ()
    date: str = field(default_factory=lambda: f"{datetime.date.today()}")
    commit: str | None = field(default_factory=commit_of_checkout)
    hardware: Mapping[str, Any] = field(default_factory=hardware_here)
    versions: Mapping[str, str] = field(default_factory=versions_here)

    def __post_init__(self) -> None:
        for name in ("rows", "seeds", "notes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def save(self, folder: Path) -> Path:
        """Write it as ``<question>_<hardware>_<date>.json``, over one of that name."""
        part = self.save_part(folder)
        return part.replace(part.with_suffix(""))

    def save_part(self, folder: Path) -> Path:
        """Write what is known so far beside, as ``.json.part``, never rendered."""
        folder.mkdir(parents=True, exist_ok=True)
        hardware = slug(dict(self.hardware))
        part = folder / f"{self.question}_{hardware}_{self.date}.json.part"
        text = json.dumps(_finite(asdict(self)), indent=1, allow_nan=False)
        part.write_text(text + "\n")
        return part


def load(path: Path) -> Result:
    """Read what `Result.save` wrote."""
    return Result(**json.loads(path.read_text()))


def newest(folder: Path = FOLDER) -> dict[str, Path]:
    """The file of the last date for each question that has results."""
    found: dict[str, Path] = {}
    paths = [*folder.glob("*_*_*.json"), *folder.glob("*_*_*.md")]
    for path in sorted(paths, key=lambda path: path.stem[-10:]):
        found[path.name.split("_")[0]] = path
    return found


def _finite(value: Any) -> Any:
    """What JSON cannot say, numbers that are none, becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


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
    """The lines of a table, each as wide as its head and what is usual."""

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


@dataclass(frozen=True)
class Question:
    """How a question is asked, and how the answer is shown."""

    name: str  # as `python -m benchmarks` knows it
    text: str  # the question, what is counted, and the baseline
    # adds the options of the command to a parser
    options: Callable[[argparse.ArgumentParser], Any]
    # measures: each row as soon as it is known, a mapping or a dataclass. The notes of
    # the result may be added to ``arguments.notes`` meanwhile
    rows: Callable[[argparse.Namespace], Iterable[Any]]
    columns: Mapping[str, str]  # what is shown of a row, and the format of each
    # makes a picture of the result; None: there is none
    plot: Callable[[Result], Any] | None = None

    def main(self, arguments: Sequence[str] | None = None) -> Result:
        """Ask it: print the table, and write the JSON file.

        What is known by then is in a file beside, named ``.part``, if it ends early.
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
