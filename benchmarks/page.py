"""What the page on Dask's dashboard costs training.

Question: How much slower is training when the page `/daskdl` has something to show, and
          when somebody looks at it?
Counted:  Examples per second of `fit` on two worker processes of one thread, after the
          first epoch, for a network of 5.8 million parameters and batches of 64.
          Baseline: the same fit while replicas report nothing to the page. looked at:
          a client of bokeh has the page open, which changes each second. All three
          run one after the other, in turn, `--rounds` times; the ratio is the median
          over rounds.
Run:      python -m benchmarks page --rounds 7
"""

import argparse
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from bokeh.client import pull_session
from distributed import Client

from benchmarks.clusters import local_client, trainer
from benchmarks.results import Question, median_ratio, medians
from benchmarks.work import BATCH, samples
from daskdl.channel.remote import RemoteChannel

ROWS = 12_800
CASES = {"no reports": (False, False), "page": (True, False), "looked at": (True, True)}


def reporting(enabled: bool) -> None:
    """On a worker: let replicas report to the page, or not."""
    RemoteChannel.has_dashboard = enabled


@contextlib.contextmanager
def looking(client: Client) -> Iterator[None]:
    """Have the page open, as a browser has."""
    port = client.scheduler_info()["services"]["dashboard"]
    over = threading.Event()

    def look() -> None:
        session = pull_session(url=f"http://127.0.0.1:{port}/daskdl")
        while not over.wait(0.1):
            session.force_roundtrip()
        session.close()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measured(client: Client, case: str, epochs: int) -> dict[str, float]:
    reports, looked_at = CASES[case]
    client.run(reporting, reports)
    x, y = samples(ROWS)
    with looking(client) if looked_at else contextlib.nullcontext():
        history = trainer(client).fit(x, y, epochs=epochs, batch_size=BATCH)
    seconds = sum(history.column("seconds")[1:])
    return {"samples_per_s": sum(history.column("examples")[1:]) / seconds}


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    with local_client(2) as client:
        for case in CASES:  # a first fit begins a page, and compiles
            measured(client, case, 2)
        for _ in range(asked.rounds):
            for case, rounds in found.items():
                rounds.append(measured(client, case, asked.epochs))
    base = found["no reports"]
    for case, rounds in found.items():
        ratio = median_ratio(rounds, base, "samples_per_s")
        yield {"case": case, **medians(rounds), "ratio": ratio, "rounds": rounds}


QUESTION = Question(
    "page",
    __doc__,
    rows,
    "case samples_per_s:,.0f ratio:.3f",
    {"--rounds": 7, "--epochs": 4},
)
