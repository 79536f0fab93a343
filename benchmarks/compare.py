"""Ratios of this run beside those of the last committed run.

Question: Has anything become slower, relative to the baseline of the same run?
Counted:  Ratios that were measured within one run, never absolute times: machines
          differ, and the speed of one changes by the minute. `now / then` is the ratio
          of two such ratios, marked where it differs from 1 by more than a tenth.
Baseline: benchmarks/baseline.json, which `--write` writes.
Run:      python -m benchmarks compare
          python -m benchmarks compare --of benchmarks/results/*.json --write
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.__main__ import question_of
from benchmarks.results import (
    ROOT,
    Result,
    columns_of,
    load,
    parser_of,
    text_table,
)

BASELINE = ROOT / "benchmarks" / "baseline.json"
MARKED = 0.1

RATIOS = ("ratio", "efficiency", "over_bound", "to_ddp", "to_single")
NAMES = (  # columns that identify a row
    *("work", "rate", "contestant", "case", "workers", "density"),
    *("replicas", "step_ms", "exchange_every", "routing"),
)

# Measured where no results are given: some minutes.
GUARD = {
    "encode": "--size 5_000_000",
    "wire-size": "--repeat 5",
    "peers": "--contestants single ddp daskdl daskdl-16 --seconds 8 --seeds 0 1 2",
}


def ratios(result: Result) -> dict[str, float]:
    """Every ratio of a result, by name.

    Example:
        >>> rows = [{"case": "find", "density": 0.01, "ratio": 1.5, "ms": 3.0}]
        >>> ratios(Result("encode", {}, rows, "", commit="", hardware={}, versions={}))
        {'encode, find, 0.01, ratio': 1.5}
    """
    values = {}
    for row in result.rows:
        names = [str(row[name]) for name in NAMES if row.get(name) not in (None, "")]
        for column in RATIOS:
            value = row.get(column)
            if value is not None and math.isfinite(value):
                values[", ".join([result.question, *names, column])] = value
    return values


def beside(now: Mapping[str, float], then: Mapping[str, float]) -> list[dict[str, Any]]:
    """Ratios of both runs first, then those of only one."""
    rows = []
    for name in sorted(
        {**now, **then}, key=lambda name: not (name in now and name in then)
    ):
        change = now.get(name, math.nan) / then.get(name, math.nan)
        row = {"what": name, "then": then.get(name), "now": now.get(name)}
        rows.append(
            row | {"now / then": change, "mark": "!" * (abs(change - 1) > MARKED)}
        )
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("compare", __doc__)
    parser.add_argument(
        "--of",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="compare these results instead of running",
    )
    parser.add_argument(
        "--write", action="store_true", help="make this run the baseline"
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        default=BASELINE,
        metavar="FILE",
        help="of the earlier run (%(default)s)",
    )
    asked = parser.parse_args(arguments)
    if asked.of:
        results = [load(path) for path in asked.of]
    else:
        results = [
            question_of(name).main([*options.split(), "--no-results"])
            for name, options in GUARD.items()
        ]
    now = {name: ratio for result in results for name, ratio in ratios(result).items()}
    then: dict[str, Any] = {"ratios": {}}
    if asked.baseline.exists():
        then = json.loads(asked.baseline.read_text())
        print(f"# then: {then['date']}, commit {then['commit']}, {then['hardware']}")
    columns = columns_of("what then:.3f now:.3f") | {"now / then": ".3f", "mark": ""}
    for line in text_table(columns, beside(now, then["ratios"])):
        print(line)
    if asked.write:
        first = results[0]
        baseline = {
            "date": first.date,
            "commit": first.commit,
            "hardware": first.hardware,
            "versions": first.versions,
            "commands": [result.command for result in results],
            "ratios": {name: round(value, 4) for name, value in now.items()},
        }
        asked.baseline.write_text(json.dumps(baseline, indent=1) + "\n")
