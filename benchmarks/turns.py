"""Contestants take turns, round by round, at each rate of the links.

Machines change their speed from minute to minute. So what is compared is the ratio of
two rates of one round, and of these the median is taken.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.contest import Course, compete, ratio
from benchmarks.contestants import CONTESTANTS, Contestant
from benchmarks.namespaces import unavailable
from benchmarks.places import UNLIMITED, Place, hosts
from benchmarks.work import WORKS

BASE = "independent"
STREAM = Contestant("one TCP stream", "stream")

COLUMNS = {
    "contestant": "",
    "rate": "",
    "samples_per_s": ",.0f",
    "ratio": ".3f",
    "ratio_lowest": ".3f",
    "ratio_highest": ".3f",
    "sent_kb_per_step": ",.1f",
    "startup_s": ".1f",
    "error": "",
}


def options(
    parser: argparse.ArgumentParser, rates: Sequence[str], contestants: Sequence[str]
) -> None:
    """Of a question about contestants on links."""
    parser.add_argument(
        "--rates",
        nargs="+",
        default=list(rates),
        help="of each link, as tc has it (1gbit, 10mbit), or unlimited",
    )
    parser.add_argument(
        "--contestants",
        nargs="+",
        choices=CONTESTANTS,
        default=list(contestants),
        metavar="NAME",
        help=f"of {', '.join(CONTESTANTS)}",
    )
    parser.add_argument("--hosts", type=int, default=2, choices=(2, 3, 4))
    parser.add_argument("--work", choices=WORKS, default="mlp")
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--seconds", type=float, default=10.0, help="that are counted")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before")
    parser.add_argument("--patience", type=float, default=240.0, help="for a start")
    parser.add_argument(
        "--python", default=sys.executable, help="that has the contestants' libraries"
    )
    parser.add_argument(
        "--loopback", action="store_true", help="all on this host; only unlimited"
    )


def available(asked: argparse.Namespace, question: str) -> bool:
    """Whether there can be such hosts; if not, the reason is printed."""
    reason = None if asked.loopback else unavailable()
    if reason is not None:
        print(f"# {question} skipped, no network namespaces: {reason}; --loopback does")
    return reason is None


def course(asked: argparse.Namespace, **changes: Any) -> Course:
    """What the options ask of each contestant."""
    found = {
        name: getattr(asked, name)
        for name in ("work", "optimizer", "seconds", "warm_up", "patience", "python")
    }
    return Course(**found | changes)


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One for each rate and contestant, with the median over rounds."""
    names = list(dict.fromkeys([BASE, *asked.contestants]))
    with hosts(asked.hosts, loopback=asked.loopback) as place:
        for rate in asked.rates:
            place.limit(rate)
            _note_what_it_carries(asked, place, rate)
            rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for seed in asked.seeds:
                for name in names:
                    found = compete(CONTESTANTS[name], place, course(asked), seed)
                    rounds[name].append(found)
                    said = found.get("error", f"{found.get('samples_per_s', 0):,.0f}")
                    print(f"# {rate} {name}: {said}", file=sys.stderr, flush=True)
            for name in names:
                yield row(CONTESTANTS[name], rate, rounds[name], rounds[BASE])


def _note_what_it_carries(asked: argparse.Namespace, place: Place, rate: str) -> None:
    found = compete(STREAM, place, course(asked, seconds=2.0, warm_up=0.0))
    said = found.get("error", f"{found.get('mbit_per_s', 0):,.0f} Mbit/s")
    asked.notes.append(f"{rate}: one TCP stream from host to host carries {said}")


def row(
    contestant: Contestant,
    rate: str,
    rounds: Sequence[dict[str, Any]],
    base: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Of one contestant at one rate; a round that failed counts for nothing.

    Args:
        contestant: Whose row it is.
        rate: Of the links.
        rounds: What it printed in each.
        base: What the baseline printed in the same rounds.
    """
    pairs = zip(rounds, base, strict=True)
    key = "samples_per_s"
    ratios = [ratio(own.get(key), other.get(key)) for own, other in pairs]
    ratios = [own for own in ratios if not math.isnan(own)]
    errors = [own["error"] for own in rounds if "error" in own]
    return {
        "contestant": contestant.name,
        "rate": rate,
        "samples_per_s": median(rounds, key),
        "ratio": statistics.median(ratios) if ratios else math.nan,
        "ratio_lowest": min(ratios, default=math.nan),
        "ratio_highest": max(ratios, default=math.nan),
        "sent_kb_per_step": median(rounds, "sent_kb_per_step"),
        "startup_s": median(rounds, "startup_s"),
        "error": "; ".join(dict.fromkeys(errors)) or None,
        "rounds": list(rounds),
    }


def median(rounds: Sequence[dict[str, Any]], name: str) -> float:
    """Over the rounds that have it; NaN if none has."""
    found = [own[name] for own in rounds if own.get(name) is not None]
    return float(statistics.median(found)) if found else math.nan


ALL_RATES = (UNLIMITED, "1gbit", "100mbit", "10mbit")
