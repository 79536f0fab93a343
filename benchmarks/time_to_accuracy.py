"""How long it takes to be as good as one process.

Question: at each rate of the links, after how many seconds is a model as good as the
          one that a single process trains?
Counted:  seconds of training until the score on rows that were not trained on is first
          as good as the target, start-up apart. The target is what one process has at
          the end: the mean over seeds of its scores in the last quarter of `--seconds`.
          Where the processes train in step, they and the clock stand still while the
          model is scored; for all others, daskdl too, the clock runs on. What shares a
          model has `--rate-factor` times the learning rate of one process, by default
          as many times as there are hosts. Hosts and links are those of
          `links`.
Baseline: one process, and PyTorch's DistributedDataParallel.
Run:      python -m benchmarks time-to-accuracy --work mlp --rates unlimited 1gbit
"""

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import contest
from benchmarks.contest import CONTESTANTS, Course, compete
from benchmarks.namespaces import Place, hosts
from benchmarks.report import curves
from benchmarks.results import Question
from benchmarks.work import WORKS, Task, reaches

SOME = ("ddp", "ddp-powersgd", "post-local-sgd", "daskdl", "daskdl-16")
LAST = 0.75  # of the time of one process: what comes then is its target
OUT_OF_REACH = {"accuracy": 2.0, "loss": -1.0}

Curve = Sequence[tuple[float, float]]

COLUMNS = {
    "contestant": "",
    "rate": "",
    "work": "",
    "target": ".4f",
    "reached_s": ",.1f",
    "to_single": ".2f",
    "to_ddp": ".2f",
    "reached": "",
    "startup_s": ".1f",
    "error": "",
}


def options(parser: argparse.ArgumentParser) -> None:
    contest.options(parser, contest.ALL_RATES[:3], SOME)
    parser.set_defaults(seconds=30.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--limit", type=float, help="seconds at most (4 times --seconds)"
    )
    parser.add_argument("--rate-factor", type=float, help="(as many as hosts)")


def target_of(runs: Sequence[Curve]) -> float:
    """What one process has in the last quarter of its time, mean over seeds.

    Example:
        >>> target_of([[(1.0, 0.5), (8.0, 0.75), (10.0, 1.0)]])
        0.875
    """
    ends = [
        statistics.mean(score for at, score in run if at >= LAST * run[-1][0])
        for run in runs
    ]
    return statistics.mean(ends)


def first_reached(work: Task, curve: Curve, target: float) -> float | None:
    """Seconds until the first score that is as good as a target."""
    return next((at for at, score in curve if reaches(work, score, target)), None)


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if not contest.available(asked, "time-to-accuracy"):
        return
    work = WORKS[asked.work]
    with hosts(asked.hosts, loopback=asked.loopback) as place:
        course = contest.course(asked, target=OUT_OF_REACH[work.score])
        single = _runs(place, "single", course, asked.seeds)
        target = target_of([run["curve"] for run in single])
        for run in single:
            run["reached_s"] = first_reached(work, run["curve"], target)
        for rate in asked.rates:
            place.limit(rate)
            yield from _at(asked, place, rate, target, single)


def _at(
    asked: argparse.Namespace,
    place: Place,
    rate: str,
    target: float,
    single: Sequence[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """The rows of one rate."""
    course = contest.course(
        asked,
        target=target,
        seconds=asked.limit or 4 * asked.seconds,
        rate_factor=asked.rate_factor or asked.hosts,
    )
    found = {"single": single}
    for name in dict.fromkeys(["ddp", *asked.contestants]):
        found[name] = _runs(place, name, course, asked.seeds)
    common = {"rate": rate, "work": asked.work, "target": target}
    for name, runs in found.items():
        yield common | row(name, runs, single, found["ddp"])


def _runs(
    place: Place, name: str, course: Course, seeds: Sequence[int]
) -> list[dict[str, Any]]:
    runs = []
    for seed in seeds:
        runs.append(compete(CONTESTANTS[name], place, course, seed))
        said = runs[-1].get("error", runs[-1].get("reached_s"))
        print(f"# {name} {seed}: {said}", file=sys.stderr, flush=True)
    return runs


def row(
    name: str,
    runs: Sequence[dict[str, Any]],
    single: Sequence[dict[str, Any]],
    ddp: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Of one contestant; a time is known only if all seeds have one."""
    own = seconds(runs)
    reached = sum(run.get("reached_s") is not None for run in runs)
    errors = [run["error"] for run in runs if "error" in run]
    return {
        "contestant": CONTESTANTS[name].name,
        "reached_s": own,
        "to_single": seconds(single) / own,
        "to_ddp": seconds(ddp) / own,
        "reached": f"{reached} of {len(runs)}",
        "startup_s": contest.median(runs, "startup_s"),
        "curve": runs[0].get("curve"),
        "error": "; ".join(dict.fromkeys(errors)) or None,
        "rounds": list(runs),
    }


def seconds(runs: Sequence[dict[str, Any]]) -> float:
    """Median time to the target; NaN if a seed did not come to it.

    Example:
        >>> seconds([{"reached_s": 3.0}, {"reached_s": 5.0}]), seconds([{"error": "!"}])
        (4.0, nan)
    """
    found = [run.get("reached_s") for run in runs]
    known = [own for own in found if own is not None]
    return statistics.median(known) if len(known) == len(found) else math.nan


QUESTION = Question(
    "time-to-accuracy",
    __doc__,
    options,
    rows,
    COLUMNS,
    lambda result: curves(result, "contestant", "rate"),
)
