"""daskdl beside other ways of training with several processes.

Question: how fast is each way that PyPI has for Python 3.11 on a CPU, at equal work?
Counted:  as in `benchmarks.links`, whose hosts these are; by default their links carry
          what they can. Each contestant is a script of `benchmarks/peers`, with the
          settings that its documentation recommends. One that cannot run is named with
          its error.
Baseline: as many plain processes that know nothing of each other, and one alone.
Run:      python -m pip install -c constraints.txt -r benchmarks/peers/requirements.txt
          python -m benchmarks peers
"""

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks import turns
from benchmarks.contestants import CONTESTANTS
from benchmarks.places import UNLIMITED
from benchmarks.plots import bars
from benchmarks.questions import Question


def options(parser: argparse.ArgumentParser) -> None:
    turns.options(parser, [UNLIMITED], list(CONTESTANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if turns.available(asked, "peers"):
        yield from turns.rows(asked)


QUESTION = Question(
    "peers",
    __doc__,
    options,
    rows,
    turns.COLUMNS,
    lambda result: bars(result, "ratio", "contestant", "rate"),
)

if __name__ == "__main__":
    QUESTION.main()
