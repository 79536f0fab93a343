"""Ratios of this run beside those of the last committed one.

Question: has anything become slower since, in comparison with its own baseline?
Counted:  ratios that were measured within one run, never absolute times: machines
          differ, and one machine differs from minute to minute. `now / then` is the
          ratio of two such ratios; a mark stands where it is further from 1 than a
          tenth.
Baseline: benchmarks/baseline.json, which `--write` writes.
Run:      python -m benchmarks compare
          python -m benchmarks compare --of benchmarks/results/*.json --write
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.__main__ import question_of
from benchmarks.results import ROOT, Lines, Result, load

BASELINE = ROOT / "benchmarks" / "baseline.json"
MARKED = 0.1

# Columns with ratios of one run, and those that say what of.
RATIOS = ("ratio", "efficiency", "over_bound", "to_ddp", "to_single")
NAMES = (
    *("work", "rate", "contestant", "case", "workers", "density"),
    *("replicas", "step_ms", "exchange_every", "routing"),
)

# What is measured where no results are given: some minutes.
GUARD = {
    "encode": ["--size", "5_000_000"],
    "wire-size": ["--repeat", "5"],
    "peers": [
        *("--contestants", "single", "ddp", "daskdl", "daskdl-16"),
        *("--seconds", "8", "--seeds", "0", "1", "2"),
    ],
}

COLUMNS = {"what": "", "then": ".3f", "now": ".3f", "now / then": ".3f", "mark": ""}


def ratios(result: Result) -> dict[str, float]:
    """Every ratio of a result, by what it is of.

    Example:
        >>> rows = [{"case": "find", "density": 0.01, "ratio": 1.5, "ms": 3.0}]
        >>> ratios(Result("encode", {}, rows, "", commit="", hardware={}, versions={}))
        {'encode, find, 0.01, ratio': 1.5}
    """
    found = {}
    for row in result.rows:
        names = [str(row[name]) for name in NAMES if row.get(name) not in (None, "")]
        for column in RATIOS:
            value = row.get(column)
            if value is not None and math.isfinite(value):
                found[", ".join([result.question, *names, column])] = value
    return found


def beside(now: Mapping[str, float], then: Mapping[str, float]) -> list[dict[str, Any]]:
    """What both have, and then what only one has."""
    both = [name for name in now if name in then]
    one = [name for name in [*now, *then] if name not in both]
    rows = []
    for name in [*both, *one]:
        change = now.get(name, math.nan) / then.get(name, math.nan)
        marked = "!" * (abs(change - 1) > MARKED)
        rows.append(
            {
                "what": name,
                "then": then.get(name),
                "now": now.get(name),
                "now / then": change,
                "mark": marked,
            }
        )
    return rows


def measured(asked: argparse.Namespace) -> list[Result]:
    """Given results, or those of the guard, which are written nowhere."""
    if asked.of:
        return [load(path) for path in asked.of]
    results = []
    for name, options in GUARD.items():
        question = question_of(name)
        results.append(question.main([*options, "--no-results"]))
    return results


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--of", type=Path, nargs="+", metavar="FILE", help="results, instead of a run"
    )
    parser.add_argument("--write", action="store_true", help="as the new baseline")
    parser.add_argument("--baseline", type=Path, default=BASELINE, metavar="FILE")
    asked = parser.parse_args(arguments)
    results = measured(asked)
    now = {name: own for result in results for name, own in ratios(result).items()}
    then: dict[str, Any] = {"ratios": {}}
    if asked.baseline.exists():
        then = json.loads(asked.baseline.read_text())
        print(f"# then: {then['date']}, commit {then['commit']}, {then['hardware']}")
    lines = Lines(COLUMNS)
    print(lines.head())
    for row in beside(now, then["ratios"]):
        print(lines.row(row))
    if asked.write:
        write(asked.baseline, results, now)


def write(path: Path, results: list[Result], now: Mapping[str, float]) -> None:
    """Make these ratios the baseline, with what they were measured on."""
    first = results[0]
    text = {
        "date": first.date,
        "commit": first.commit,
        "hardware": first.hardware,
        "versions": first.versions,
        "commands": [result.command for result in results],
        "ratios": {name: round(value, 4) for name, value in now.items()},
    }
    path.write_text(json.dumps(text, indent=1) + "\n")
