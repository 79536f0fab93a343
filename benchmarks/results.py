"""Results that are kept: one JSON file for each run of a question.

A file says all that is needed to read it, to render it and to make it again: the rows,
how each column is written, the hardware, versions, commit, seeds and command.
"""

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine

FOLDER = Path(__file__).parent / "results"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Result:
    """What one run of a question found.

    Attributes:
        question: Its name, as `python -m benchmarks` knows it.
        columns: Name of each column that is shown, and its format.
        rows: A mapping each, with more than is shown.
        command: That made it.
        seeds: Of all that is random.
        notes: What a reader has to know, such as a link that was not to be had.
    """

    question: str
    columns: Mapping[str, str]
    rows: Sequence[Row]
    command: str
    seeds: Sequence[int] = (0,)
    notes: Sequence[str] = ()
    date: str = field(default_factory=lambda: f"{datetime.date.today()}")
    commit: str | None = field(default_factory=machine.commit)
    hardware: Mapping[str, Any] = field(default_factory=machine.hardware)
    versions: Mapping[str, str] = field(default_factory=machine.versions)

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
        hardware = machine.slug(dict(self.hardware))
        part = folder / f"{self.question}_{hardware}_{self.date}.json.part"
        text = json.dumps(_finite(asdict(self)), indent=1, allow_nan=False)
        part.write_text(text + "\n")
        return part


def load(path: Path) -> Result:
    """Read what `Result.save` wrote."""
    return Result(**json.loads(path.read_text()))


def newest(folder: Path = FOLDER) -> dict[str, Path]:
    """The file of the last date of each question that has results."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*_*_*.json"), key=lambda path: path.stem[-10:]):
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
