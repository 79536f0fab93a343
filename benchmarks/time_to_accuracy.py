"""How long it takes to be as good as one process.

Question: At each rate of the links, how many seconds does it take to train a model as
          good as that of a single process?
Counted:  Seconds of training, without start-up, until the mean of three successive
          scores on rows that were not trained on reaches the target, which is the score
          of one process at the end: the median of its scores, over all seeds, in the
          last quarter of `--seconds`.
          Each contestant, the single process too, has the optimizer and the learning
          rate that suit it: of `--optimizers` and `--rate-factors` times the task's
          rates, those with which a seed that does not count reaches the target soonest
          on the first of `--rates`, or else has the best lowest score in its last
          quarter, which a setting that oscillates has not. A later setting is given no
          longer than the best one before it took. If neither of the first two seeds
          reaches the target in `--limit` seconds, a contestant makes no more runs at
          this rate. A contestant's score is that of the model which its user would get;
          with local SGD, after a mean. While the model of a synchronous contestant is
          scored, training and clock stop; for all others, including daskdl, the clock
          continues. Hosts and links are those of `links`. A run of hours can be made in
          parts: `--after` names the file of the parts before, whose target, settings
          and rows stay.
Baseline: one process, and PyTorch's DistributedDataParallel.
Run:      python -m benchmarks time-to-accuracy --rates unlimited 1gbit
          --optimizers SGD momentum AdamW
"""

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import contest
from benchmarks.contest import CONTESTANTS, Course, compete
from benchmarks.namespaces import Place, hosts
from benchmarks.peers.loop import reached
from benchmarks.report import curves
from benchmarks.results import Question, load
from benchmarks.work import OPTIMIZERS, WORKS, Task

SOME = ("ddp", "ddp-powersgd", "post-local-sgd", "daskdl", "daskdl-16")
LAST = 0.75  # the share of one process's time before the scores that make its target
OUT_OF_REACH = {"accuracy": 2.0, "loss": -1.0}

TUNING_SEED = 1000  # of the runs that choose a setting, which do not count
TRIES = (
    2  # runs at one rate after which a contestant that never got there makes no more
)

Runs = Sequence[dict[str, Any]]


class Setting(NamedTuple):
    """What each contestant chooses for itself."""

    optimizer: str
    rate_factor: float  # on the task's learning rate for this optimizer


def last_scores(run: Mapping[str, Any]) -> list[float]:
    """Scores in the last quarter of a run.

    Example:
        >>> last_scores({"curve": [(1.0, 0.5), (8.0, 0.75), (10.0, 1.0)]})
        [0.75, 1.0]
    """
    ends = run["curve"][-1][0]
    return [score for at, score in run["curve"] if at >= LAST * ends]


def target_of(runs: Runs) -> float:
    """Median score in the last quarters of all runs.

    Example:
        >>> target_of([{"curve": [(1.0, 0.5), (8.0, 0.75), (10.0, 1.0)]}])
        0.875
    """
    return statistics.median(score for run in runs for score in last_scores(run))


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if not contest.available(asked, "time-to-accuracy"):
        return
    work, seeds = WORKS[asked.work], asked.seeds
    earlier = [] if asked.after is None else load(asked.after).rows
    ways = {contestant.name: name for name, contestant in CONTESTANTS.items()}
    chosen, finished = {}, {}
    for former in earlier:
        name = ways[former["contestant"]]
        chosen[name] = Setting(former["optimizer"], former["rate_factor"])
        finished[former["rate"], name] = former["rounds"]
        yield dict(former)
    with hosts(asked.hosts, loopback=asked.loopback) as place:
        # The single process trains to the end, for its scores make the target.
        target, optimizer = OUT_OF_REACH[work.score], asked.optimizers[0]
        course = contest.course_of(asked, target=target, optimizer=optimizer)
        options = list(
            itertools.starmap(
                Setting, itertools.product(asked.optimizers, asked.rate_factors)
            )
        )
        if earlier:
            target = earlier[0]["target"]
            single = finished[earlier[0]["rate"], "single"]
        else:
            chosen["single"] = tuned(place, "single", course, options)
            adapted = replace(course, **chosen["single"]._asdict())
            single = runs_of(place, "single", adapted, seeds)
            target = target_of(single)
            for run in single:
                run["reached_s"] = reached(run["curve"], work, target)
        course = replace(course, target=target, seconds=asked.limit)
        for rate in asked.rates:
            place.limit(rate)
            outcomes = {"single": single}
            case = {"rate": rate, "work": asked.work, "target": target}
            for name in dict.fromkeys(["ddp", *asked.contestants]):
                if (rate, name) in finished:
                    outcomes[name] = finished[rate, name]
                    continue
                if name not in chosen:
                    chosen[name] = tuned(place, name, course, options)
                adapted = replace(course, **chosen[name]._asdict())
                outcomes[name] = runs_of(place, name, adapted, seeds)
                for way in ("single", name) if name == "ddp" else (name,):
                    setting = chosen[way]._asdict()
                    result = row(way, outcomes[way], single, outcomes["ddp"])
                    yield case | setting | result


def tuned(
    place: Place, name: str, course: Course, options: Sequence[Setting]
) -> Setting:
    """The setting that suits a contestant."""
    if len(options) == 1:
        return options[0]
    runs: dict[Setting, dict[str, Any]] = {}
    for setting in options:
        times = [run["reached_s"] for run in runs.values() if run.get("reached_s")]
        enough = min(times, default=course.seconds)
        tried = replace(course, **setting._asdict(), seconds=enough)
        (runs[setting],) = runs_of(place, name, tried, [TUNING_SEED])
    return best(runs, WORKS[course.work])


def best(runs: Mapping[Setting, dict[str, Any]], work: Task) -> Setting:
    """The setting with which the target was reached soonest, or that ended best.

    Example:
        >>> near, far = ({"curve": [(1.0, score)]} for score in (0.9, 0.5))
        >>> slow, fast = Setting("SGD", 1.0), Setting("SGD", 2.0)
        >>> best({slow: far, fast: near}, WORKS["mlp"])
        Setting(optimizer='SGD', rate_factor=2.0)
        >>> best({slow: near | {"reached_s": 9.0}, fast: near}, WORKS["mlp"])
        Setting(optimizer='SGD', rate_factor=1.0)
        >>> rough = {"curve": [(9.0, 0.1), (10.0, 1.0)]}
        >>> best({slow: near, fast: rough}, WORKS["mlp"])
        Setting(optimizer='SGD', rate_factor=1.0)
    """
    times = {s: run["reached_s"] for s, run in runs.items() if run.get("reached_s")}
    if times:
        return min(times, key=times.__getitem__)
    scores = {s: last_scores(run) for s, run in runs.items() if "curve" in run}
    if not scores:
        return next(iter(runs))
    if work.score == "accuracy":
        return max(scores, key=lambda setting: min(scores[setting]))
    return min(scores, key=lambda setting: max(scores[setting]))


def runs_of(place: Place, name: str, course: Course, seeds: Sequence[int]) -> Runs:
    runs: list[dict[str, Any]] = []
    can_reach = course.target != OUT_OF_REACH[WORKS[course.work].score]
    for seed in seeds:
        hopeless = can_reach and not any(run.get("reached_s") for run in runs)
        if hopeless and len(runs) >= TRIES:
            break
        runs.append(compete(CONTESTANTS[name], place, course, seed))
        outcome = runs[-1].get("error", runs[-1].get("reached_s"))
        print(f"# {name} {seed}: {outcome}", file=sys.stderr, flush=True)
    return runs


def row(name: str, runs: Runs, single: Runs, ddp: Runs) -> dict[str, Any]:
    """A contestant's row; it has a time only if all seeds reached the target."""
    there = sum(run.get("reached_s") is not None for run in runs)
    return {
        "contestant": CONTESTANTS[name].name,
        "reached_s": seconds(runs),
        "to_single": seconds(single) / seconds(runs),
        "to_ddp": seconds(ddp) / seconds(runs),
        "reached": f"{there} of {len(runs)}",
        "startup_s": contest.median(runs, "startup_s"),
        "curve": runs[0].get("curve"),
        "error": contest.errors_of(runs),
        "rounds": list(runs),
    }


def seconds(runs: Runs) -> float:
    """Median time to the target; NaN if a seed did not reach it.

    Example:
        >>> seconds([{"reached_s": 3.0}, {"reached_s": 5.0}]), seconds([{"error": "!"}])
        (4.0, nan)
    """
    times = [run.get("reached_s") for run in runs]
    return math.nan if None in times else statistics.median(times)


QUESTION = Question(
    "time-to-accuracy",
    __doc__,
    rows,
    "contestant rate work optimizer rate_factor:g target:.4f reached_s:,.1f "
    "to_single:.2f to_ddp:.2f reached startup_s:.1f error",
    {
        name: option
        for name, option in contest.options(
            contest.ALL_RATES[:3], SOME, seconds=30.0
        ).items()
        if name != "--optimizer"
    }
    | {
        "--optimizers": {
            "nargs": "+",
            "choices": OPTIMIZERS,
            "default": ["SGD"],
            "help": "of which each contestant has its best",
        },
        "--after": {
            "type": Path,
            "metavar": "FILE",
            "help": "results of the parts before; theirs stay",
        },
        "--limit": {"type": float, "default": 60.0, "help": "seconds at most"},
        "--rate-factors": {
            "nargs": "+",
            "type": float,
            "default": [1.0, 2.0, 4.0, 8.0],
            "help": "on the learning rate, of which each contestant has its best",
        },
    },
    lambda result: curves(result, "contestant", "rate"),
)
