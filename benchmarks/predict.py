"""Prediction on two workers beside one process.

Question: how much faster do two workers predict than one process, and what does daskdl
          add for 10,000 rows?
Counted:  rows per second. Blocks of random rows are made where they are needed; outputs
          stay where they were made. One process: a plain loop, `model(x)` for batches
          under `torch.inference_mode`, one torch thread. After it, in each round, two
          workers of one thread each, which compute a lazy `daskdl.predict`. Before it
          the same two processes run the plain loop, each over half of the blocks, with
          the model there already: more is not to be had of the machine. Overhead:
          seconds of the two workers together, less those of the two loops.
Run:      python -m benchmarks predict --rounds 5
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import psutil
import torch
from distributed import Client, wait
from torch import nn

import daskdl
from benchmarks.clusters import local_cluster
from benchmarks.results import Question
from benchmarks.work import cnn, mlp
from daskdl.serialization import PackedModel
from daskdl.util import freed_memory_kept

BATCH = 64
BLOCK = 64 * BATCH  # rows: 12.8 MB, a tenth of what Dask recommends
WORKERS = 2


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


def small() -> nn.Module:
    """0.27 M parameters: to send a row costs nearly as much as to score it."""
    return nn.Sequential(
        nn.Linear(784, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


CASES = (
    Case("mlp", mlp, (784,)),
    Case("cnn", cnn, (1, 28, 28)),
    Case("small mlp", small, (784,)),
)


@dataclass(frozen=True)
class Row:
    case: str
    rows: int
    alone: float  # rows per second of one process, median over rounds
    apart: float  # of two loops at once, likewise
    together: float  # of two workers, likewise
    limit: float  # of two loops beside one, median of the rounds' ratios
    ratio: float  # of two workers beside one process, likewise
    overhead_ms: float  # of workers, for 10,000 rows; median


def block_of(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """The rows of a block, the same wherever they are made."""
    return np.random.default_rng(number).random((BLOCK, *shape), np.float32)


def collection(case: Case, blocks: int) -> da.Array:
    """The same blocks, lazily."""

    def make(block: np.ndarray) -> np.ndarray:
        return block_of(int(block.flat[0]), case.shape)

    numbers = da.arange(blocks, chunks=1)
    chunks = ((BLOCK,) * blocks, *((size,) for size in case.shape))
    axes = list(range(1, len(case.shape) + 1))
    return numbers.map_blocks(make, chunks=chunks, new_axis=axes, dtype=np.float32)


def loop_s(model: nn.Module, shape: tuple[int, ...], numbers: Sequence[int]) -> float:
    """Seconds of a plain loop over blocks."""
    began = time.perf_counter()
    outputs = []
    with torch.inference_mode():
        for number in numbers:
            x = torch.from_numpy(block_of(number, shape))
            outputs += [model(batch).numpy() for batch in x.split(BATCH)]
    return time.perf_counter() - began


def loop_there_s(
    packed: PackedModel, shape: tuple[int, ...], numbers: Sequence[int]
) -> float:
    """The same on a worker, whose nanny gives back freed memory at once by default."""
    with freed_memory_kept():
        return loop_s(packed.module(), shape, numbers)


def apart_s(model: nn.Module, case: Case, blocks: int, client: Client) -> float:
    """Seconds of two loops at once, of the one that takes longer."""
    packed = PackedModel(model)
    loops = [
        client.submit(
            loop_there_s,
            packed,
            case.shape,
            range(rank, blocks, WORKERS),
            workers=[worker],
            pure=False,
        )
        for rank, worker in enumerate(sorted(client.nthreads()))
    ]
    return max(client.gather(loops))


def together_s(model: nn.Module, case: Case, blocks: int, client: Client) -> float:
    """Seconds of the workers, from the call until all outputs are there."""
    began = time.perf_counter()
    lazy = collection(case, blocks)
    outputs = daskdl.predict(model, lazy, client=client, batch_size=BATCH)
    done: Any = client.persist(outputs)
    wait(done)
    return time.perf_counter() - began


def measured(
    client: Client, cases: Sequence[Case], rounds: int, blocks: int
) -> Iterator[Row]:
    for case in cases:
        model, rows = case.make().eval(), blocks * BLOCK
        found = []
        for _ in range(rounds + 1):  # the first is not counted
            one = loop_s(model, case.shape, range(blocks))
            apart = apart_s(model, case, blocks, client)
            two = together_s(model, case, blocks, client)
            overhead = 1e3 * WORKERS * (two - apart) / rows * 10_000
            rates = rows / one, rows / apart, rows / two
            found.append((*rates, one / apart, one / two, overhead))
        middle = [statistics.median(column) for column in zip(*found[1:], strict=True)]
        yield Row(case.name, rows, *middle)


def processor_s() -> tuple[float, float]:
    """Seconds of this process so far, and of the processes that it has started."""
    here = psutil.Process()
    own, *others = (
        sum(process.cpu_times()[:2])
        for process in (here, *here.children(recursive=True))
    )
    return own, sum(others)


def sent(model: nn.Module, X: np.ndarray, client: Client) -> tuple[float, ...]:
    """Rows per second of one process and of the workers, and processor seconds."""
    began, before = time.perf_counter(), processor_s()
    with torch.inference_mode():
        batches = torch.from_numpy(X).split(BATCH)
        np.concatenate([model(batch).numpy() for batch in batches])
    middle, between = time.perf_counter(), processor_s()
    daskdl.predict(model, X, client=client, batch_size=BATCH)
    end, after = time.perf_counter(), processor_s()
    return (
        len(X) / (middle - began),
        len(X) / (end - middle),
        between[0] - before[0],
        after[0] - between[0],
        after[1] - between[1],
    )


IN_MEMORY_TEXT = """Prediction from the memory of the client, beside one process.

Question: how much faster do two workers predict rows that the client sends them?
Counted:  as in `predict`, with numpy outputs in the client's memory. A client sends
          rows through the scheduler ("relayed"), or to the workers ("direct",
          ``Client(direct_to_workers=True)``). Processor time: seconds of this process,
          which has client and scheduler in it, and of the workers.
"""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=32, help=f"of {BLOCK} rows")
    names = [case.name for case in CASES]
    parser.add_argument("--models", nargs="*", default=names, choices=names)


@contextlib.contextmanager
def begun(asked: argparse.Namespace) -> Iterator[tuple[Client, list[Case]]]:
    torch.set_num_threads(1)
    with (
        local_cluster(WORKERS) as cluster,
        Client(cluster) as client,
    ):
        yield client, [case for case in CASES if case.name in asked.models]


def lazy(asked: argparse.Namespace) -> Iterator[Row]:
    with begun(asked) as (client, cases):
        yield from measured(client, cases, asked.rounds, asked.blocks)


def in_memory(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with (
        begun(asked) as (client, cases),
        Client(
            client.scheduler.address, direct_to_workers=True, set_as_default=False
        ) as direct,
    ):
        for case in cases:
            model = case.make().eval()
            X = np.concatenate([block_of(i, case.shape) for i in range(asked.blocks)])
            for way, own in (("relayed", client), ("direct", direct)):
                found = [sent(model, X, own) for _ in range(asked.rounds + 1)][1:]
                ratio = statistics.median(f[1] / f[0] for f in found)
                medians = map(statistics.median, zip(*found, strict=True))
                names = ("alone", "together", "cpu_alone_s", "cpu_here_s")
                yield {
                    "case": f"{case.name}, {way}",
                    "rows": len(X),
                    **dict(zip((*names, "cpu_workers_s"), medians, strict=True)),
                    "ratio": ratio,
                }


QUESTION = Question(
    "predict",
    __doc__,
    options,
    lazy,
    {"case": "", "rows": ",", "alone": ",.0f", "apart": ",.0f", "together": ",.0f"}
    | {"limit": ".2f", "ratio": ".2f", "overhead_ms": ",.0f"},
)
IN_MEMORY = Question(
    "predict-in-memory",
    IN_MEMORY_TEXT,
    options,
    in_memory,
    {"case": "", "rows": ",", "alone": ",.0f", "together": ",.0f", "ratio": ".2f"}
    | {"cpu_alone_s": ".2f", "cpu_here_s": ".2f", "cpu_workers_s": ".2f"},
)
