"""Training on data that are not in memory.

Question: How fast is training from packed files and from lazy parts of a dask.array,
          compared with training from memory, and does prefetch hide loading that takes
          half as long as computing?
Counted:  Rows per second of the second epoch, two worker processes with one torch
          thread each. A part is 8 batches; loading one waits for that share of the time
          to train on it, as a disk or a server would make it wait. Baseline: numpy
          arrays in memory, before each.
Run:      python -m benchmarks data --rounds 5
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import numpy as np
from distributed import Client, wait

import daskdl
from benchmarks.clusters import local_client, trainer
from benchmarks.results import Question, in_turns, median_ratio, medians
from benchmarks.work import BATCH, perceptron, samples
from daskdl.data.manifest import Manifest
from daskdl.data.packed import FORMAT, PackedRows
from daskdl.data.storage import store_of

BATCHES_PER_PART = 8
PARTS = 24  # of both replicas together
LOADS = (0.0, 0.5)  # seconds to load a part / seconds to train on it


def slow(block: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return block


class SlowFiles(PackedRows):
    """Packed rows on slow storage."""

    seconds = 0.0

    def load(self, part: int) -> Any:
        return slow(super().load(part), self.seconds)


def fit(client: Client, X: Any, y: Any, prefetch: int = 2) -> dict[str, float]:
    history = trainer(client).fit(X, y, epochs=2, batch_size=BATCH, prefetch=prefetch)
    last = history[-1]
    waited = last["waits"].get("data", 0.0) / (last["seconds"] * last["replicas"])
    return {"rows_per_s": last["examples_per_s"], "waited": waited}


@contextlib.contextmanager
def _set_up() -> Iterator[tuple[str, Client]]:
    with tempfile.TemporaryDirectory() as folder, local_client(2) as client:
        yield folder, client


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with _set_up() as (folder, client):
        part = BATCH * BATCHES_PER_PART
        x, y = samples(PARTS * part)
        daskdl.data.pack(x, y, url=folder, per_file=part, client=client)
        memory = medians([fit(client, x, y) for _ in range(asked.rounds + 1)][1:])
        yield {"source": "memory", "load": 0.0, "prefetch": 2, "beside": 1.0, **memory}
        for load in LOADS:
            store = store_of(folder)
            files = SlowFiles(store, Manifest.read(store, FORMAT))
            files.seconds = load * part / (memory["rows_per_s"] / 2)  # of one replica
            lazy = da.from_array(x, chunks=(part, *x.shape[1:])).map_blocks(
                slow, files.seconds, meta=x[:0]
            )
            sources = {
                "lazy dask.array": (lazy, da.from_array(y, chunks=part)),
                "packed files": (files, None),
            }
            for (name, (X, labels)), prefetch in (
                (source, n) for source in sources.items() for n in (2, 0)
            ):
                cases = {
                    "memory": partial(fit, client, x, y),
                    "own": partial(fit, client, X, labels, prefetch),
                }
                timings = in_turns(cases, asked.rounds)
                beside = median_ratio(timings["own"], timings["memory"], "rows_per_s")
                case = {"source": name, "load": load, "prefetch": prefetch}
                yield case | medians(timings["own"]) | {"beside": beside}


PARTS_TEXT = """Training on data in many small parts.

Question: How fast is training from 2,100 parts of 10 rows, compared with 21 parts of
          1,000 of the same rows, for each kind of data that is loaded part by part?
Counted:  Rows per second of the epochs after the first, two worker processes with one
          torch thread each. Small and large parts take turns.
Run:      python -m benchmarks parts --rounds 5
"""
ROWS, FEATURES, CLASSES = 21_000, 20, 4
PART_ROWS = {"large": 1000, "small": 10}
KINDS = ("lazy array", "persisted array", "Delayed", "bag", "npz files")


def in_parts(client: Client, kind: str, size: int, folder: Path) -> tuple[Any, Any]:
    """The data in parts of so many rows."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, ROWS)
    x = rng.normal(size=(CLASSES, FEATURES))[y] + rng.normal(size=(ROWS, FEATURES))
    x = x.astype(np.float32)
    parts = [slice(start, start + size) for start in range(0, ROWS, size)]
    if kind == "Delayed":
        return [dask.delayed((x[part], y[part])) for part in parts], None
    if kind == "bag":
        pairs = list(zip(x, y, strict=True))
        return db.from_sequence(pairs, npartitions=len(parts)), None
    if kind == "npz files":
        folder = folder / str(size)
        if not folder.exists():
            folder.mkdir()
            for i, part in enumerate(parts):
                np.savez(folder / f"{i:05}.npz", x=x[part], y=y[part])
        return str(folder), None
    X = da.from_array(x, chunks=(size, FEATURES)).map_blocks(np.negative)
    Y = da.from_array(y, chunks=size)
    if kind == "persisted array":
        X, Y = client.persist([X, Y])
        wait([X, Y])
    return X, Y


def rows_per_s(client: Client, kind: str, size: int, folder: Path) -> dict[str, float]:
    fitted = trainer(client, partial(perceptron, FEATURES, 64, CLASSES))
    history = fitted.fit(*in_parts(client, kind, size, folder), epochs=4, batch_size=32)
    return {"rows_per_s": statistics.median(history.column("examples_per_s")[1:])}


def parts_rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with _set_up() as (folder, client):
        for kind in asked.kinds:
            cases = {
                name: partial(rows_per_s, client, kind, size, Path(folder))
                for name, size in PART_ROWS.items()
            }
            timings = in_turns(cases, asked.rounds)
            speeds = {
                name: medians(rounds)["rows_per_s"] for name, rounds in timings.items()
            }
            ratio = median_ratio(timings["large"], timings["small"], "rows_per_s")
            yield {"data": kind, **speeds, "ratio": ratio}


QUESTION = Question(
    "data",
    __doc__,
    rows,
    "source load:.1f prefetch:d rows_per_s:,.0f beside:.2f waited:.3f",
    {"--rounds": 5},
)
SMALL_PARTS = Question(
    "parts",
    PARTS_TEXT,
    parts_rows,
    "data large:,.0f small:,.0f ratio:.2f",
    {"--rounds": 5, "--kinds": {"nargs": "*", "default": KINDS, "choices": KINDS}},
)
