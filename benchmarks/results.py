"""Questions, the result files that they write, and the machine they were measured on.

A result is one JSON file per run of a question: rows, columns, hardware, versions,
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
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "results"
LIBRARIES = ("torch", "triton", "dask", "distributed", "numpy", "numba", "lz4")

Row = Mapping[str, Any]


def hardware_here(device: str = "cpu") -> dict[str, object]:
    """The machine, and the CUDA device that a question measures on, if it has one."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    match = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return {
        "processor": match[1] if match else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **_accelerator(device),
    }


def _accelerator(device: str) -> dict[str, object]:
    """Name, memory, driver and CUDA version of a device; nothing for other devices."""
    if not device.startswith("cuda"):
        return {}
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(device)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=20
        )
        driver = done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = None
    return {
        "accelerator": properties.name,
        "accelerator_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver,
        "cuda": torch.version.cuda,
    }


def slug(hardware: Mapping[str, Any]) -> str:
    """Hardware as a part of a file name.

    Example:
        >>> slug({"processor": "Intel(R) Xeon(R) Processor @ 2.50GHz", "cores": 2})
        'xeon-2.50ghz-2cores'
        >>> slug({"processor": "", "cores": 16, "accelerator": "NVIDIA H100 80GB HBM3"})
        'h100-80gb-hbm3'
    """
    measured_on = str(hardware.get("accelerator") or hardware["processor"])
    words = re.sub(r"\(.*?\)", " ", measured_on).lower()
    words = re.sub(r"\b(intel|amd|nvidia|cpu|processor)\b|@", " ", words)
    kept = re.findall(r"[a-z0-9.]+", words)[:4]
    return "-".join(
        kept if "accelerator" in hardware else [*kept, f"{hardware['cores']}cores"]
    )


def versions_here() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def commit_of_checkout() -> str | None:
    """With a plus if files have changed; None outside of a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        number = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return number + "+" * bool(changed)


@dataclass(frozen=True)
class Result:
    """One run of a question."""

    question: str
    columns: Mapping[str, str]  # format of each column that is shown
    rows: Sequence[Row]  # with more than is shown
    command: str
    seeds: Sequence[int] = (0,)
    notes: Sequence[str] = ()  # shown above the table
    date: str = field(default_factory=lambda: f"{datetime.date.today()}")
    commit: str | None = field(default_factory=commit_of_checkout)
    hardware: Mapping[str, Any] = field(default_factory=hardware_here)
    versions: Mapping[str, str] = field(default_factory=versions_here)

    def __post_init__(self) -> None:
        for name in ("rows", "seeds", "notes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def save(self, folder: Path) -> Path:
        """Write ``<question>_<hardware>_<date>.json``, over a file of that name."""
        part = self.save_part(folder)
        return part.replace(part.with_suffix(""))

    def save_part(self, folder: Path) -> Path:
        """Write the rows so far to a file ``.json.part``, which no page shows."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self.question}_{slug(self.hardware)}_{self.date}.json.part"
        text = json.dumps(_finite(asdict(self)), indent=1, allow_nan=False)
        (folder / name).write_text(text + "\n")
        return folder / name


def load(path: Path) -> Result:
    return Result(**json.loads(path.read_text()))


def newest(folder: Path = FOLDER) -> dict[str, Path]:
    """The latest file of each question that has results."""
    paths = [*folder.glob("*_*_*.json"), *folder.glob("*_*_*.md")]
    paths.sort(key=lambda path: path.stem[-10:])
    return {path.name.split("_")[0]: path for path in paths}


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON has not, by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


# ---- medians over rounds


def in_turns(
    cases: Mapping[Any, Callable[[], Any]], rounds: int, seconds: float = math.inf
) -> dict[Any, list[Any]]:
    """What each case returns in each round; the cases take turns.

    There are fewer rounds, but at least one, if they take longer than `seconds`.
    """
    results: dict[Any, list[Any]] = {name: [] for name in cases}
    until = time.monotonic() + seconds
    for number in range(rounds):
        if number and time.monotonic() > until:
            break
        for name, measure in cases.items():
            results[name].append(measure())
    return results


def medians(rounds: Sequence[Row]) -> dict[str, float]:
    """Median of each column over the rounds that have it; NaN if none has."""
    columns = {name: [row[name] for row in rounds if row.get(name) is not None]
               for name in rounds[0]}  # fmt: skip
    return {
        name: float(statistics.median(values)) if values else math.nan
        for name, values in columns.items()
    }


def median_ratio(rows: Sequence[Row], base: Sequence[Row], column: str) -> float:
    """Median over rounds of a column, relative to the same round of a baseline."""
    pairs = zip(rows, base, strict=True)
    return statistics.median(row[column] / base_row[column] for row, base_row in pairs)


# ---- tables


def columns_of(text: str) -> dict[str, str]:
    """Columns and their formats.

    Example:
        >>> columns_of("case ms:.2f")
        {'case': '', 'ms': '.2f'}
    """
    return {name: style for name, _, style in (c.partition(":") for c in text.split())}


def cell(row: Row, name: str, style: str) -> str:
    """A value in its column's format.

    Example:
        >>> cell({"rate": 1234.5}, "rate", ",.0f"), cell({"rate": None}, "rate", ",.0f")
        ('1,234', '-')
    """
    value = row.get(name)
    return "-" if value is None or value != value else format(value, style)


def title(name: str) -> str:
    """The heading of a column.

    Example:
        >>> title("samples_per_s"), title("startup_s"), title("sent_kb_per_step")
        ('samples/s', 'startup s', 'sent KB/step')
    """
    return name.replace("_per_", "/").replace("_kb", " KB").replace("_", " ")


def text_table(columns: Mapping[str, str], rows: Iterable[Row]) -> Iterator[str]:
    """The lines of a table for a terminal, each as soon as its row is known."""
    widths = [max(len(title(name)) + 1, 10) for name in columns]
    widths[0] = max(widths[0], 34)

    def line(cells: Sequence[str]) -> str:
        others = [f"{text:>{width}}" for text, width in zip(cells, widths, strict=True)]
        return " ".join([f"{cells[0]:<{widths[0]}}", *others[1:]]).rstrip()

    yield line([title(name) for name in columns])
    for row in rows:
        yield line([cell(row, name, style) for name, style in columns.items()])


def markdown(columns: Mapping[str, str], rows: Iterable[Row]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield "| " + " | ".join(title(name) for name in columns) + " |"
    yield "|" + "|".join("---" for _ in columns) + "|"
    for row in rows:
        cells = [cell(row, name, style) for name, style in columns.items()]
        yield "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"


# ---- questions


def parser_of(name: str, text: str) -> argparse.ArgumentParser:
    """A parser of options, whose help shows the whole text as it is."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _argument(default: Any) -> dict[str, Any]:
    """Arguments of `add_argument`, which an option may also have itself."""
    if isinstance(default, dict):
        return default
    if isinstance(default, list | tuple):
        return {"nargs": "+", "type": type(default[0]), "default": list(default)}
    return {"type": type(default), "default": default}


@dataclass(frozen=True)
class Question:
    """What `python -m benchmarks NAME` measures and shows."""

    name: str
    text: str  # the question, what is counted, and the baseline
    # Yields the rows, each as soon as it is known. It may add to ``asked.notes``.
    rows: Callable[[argparse.Namespace], Iterable[Row]]
    columns: str  # for `columns_of`
    options: Mapping[str, Any]  # a default, or the arguments of `add_argument`
    plot: Callable[[Result], Any] | None = None

    def main(self, arguments: Sequence[str]) -> Result:
        """Print the table, and write the JSON file."""
        asked = self.parser().parse_args(arguments)
        asked.notes = []
        command = shlex.join(["python", "-m", "benchmarks", self.name, *arguments])
        print(f"# {command}", flush=True)
        seeds = getattr(asked, "seeds", [0])
        columns = columns_of(self.columns)
        result = Result(
            self.name,
            columns,
            [],
            command,
            seeds,
            hardware=hardware_here(getattr(asked, "device", "cpu")),
        )

        def kept() -> Iterator[Row]:
            nonlocal result
            for row in self.rows(asked):
                result = replace(result, rows=[*result.rows, row], notes=asked.notes)
                if asked.results is not None:
                    result.save_part(asked.results)
                yield row

        for line in text_table(columns, kept()):
            print(line, flush=True)
        if asked.results is not None and result.rows:
            print(f"# written: {result.save(asked.results)}")
        return result

    def parser(self) -> argparse.ArgumentParser:
        parser = parser_of(self.name, self.text)
        for name, default in self.options.items():
            parser.add_argument(name, **_argument(default))
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
