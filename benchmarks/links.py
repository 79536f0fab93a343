"""What the rate of the links costs each way of training.

Question: how fast do two to four hosts train together, at each rate of their links?
Counted:  samples/s of all hosts together, by the wall clock, warm-up excluded and
          start-up apart; one process of one torch thread on each host. Hosts are
          network namespaces on one bridge; `tc tbf` limits each link, each way. Bytes
          are those that the host's interface has sent. The contestants take turns;
          `ratio` is the median over seeds of a contestant to the baseline in the same
          round.
Baseline: as many plain processes that know nothing of each other: what these cores can
          do.
Run:      python -m benchmarks links --rates unlimited 1gbit 100mbit 10mbit
"""

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks import turns
from benchmarks.plots import bars
from benchmarks.questions import Question

SOME = ("independent", "ddp", "ddp-powersgd", "post-local-sgd", "daskdl", "daskdl-16")


def options(parser: argparse.ArgumentParser) -> None:
    turns.options(parser, turns.ALL_RATES, SOME)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if turns.available(asked, "links"):
        yield from turns.rows(asked)


QUESTION = Question(
    "links",
    __doc__,
    options,
    rows,
    turns.COLUMNS,
    lambda result: bars(result, "ratio", "contestant", "rate"),
)

if __name__ == "__main__":
    QUESTION.main()
