"""Prediction on two workers, beside one process.

Question: How much faster do two workers predict than one process, and what does daskdl
          add for 10,000 rows?
Counted:  Rows per second. Blocks of random rows are made where they are needed; outputs
          stay where they were made. alone: a plain loop in one process, `model(x)` for
          batches of 64 under `torch.inference_mode`, one torch thread. apart: the same
          loop on two workers at once, each over half of the blocks, with the model
          there already, which is the machine's limit. together: the two workers compute
          a lazy `daskdl.predict`. Overhead: seconds of both workers for it, less those
          of the two loops. All three in each round.
Run:      python -m benchmarks predict --rounds 5
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import dask.array as da
import numpy as np
import psutil
import torch
from distributed import Client, wait
from torch import nn

import daskdl
from benchmarks.clusters import local_client, spread
from benchmarks.results import Question, medians
from benchmarks.work import BATCH, cnn, mlp, perceptron
from daskdl.process_settings import freed_memory_kept
from daskdl.serialization import PackedModel

BLOCK = 64 * BATCH  # rows: 12.8 MB, a tenth of what Dask recommends
WORKERS = 2

# The small model has 0.27 million parameters: sending a row costs nearly as much as
# scoring it.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (784,)),
    "cnn": (cnn, (1, 28, 28)),
    "small mlp": (partial(perceptron, 784, 256, 256, 10), (784,)),
}


def block_of(number: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(number).random((BLOCK, *shape), np.float32)


def lazy_blocks(shape: tuple[int, ...], blocks: int) -> da.Array:
    """The same blocks as a dask.array."""
    return da.arange(blocks, chunks=1).map_blocks(
        lambda block: block_of(int(block.flat[0]), shape),
        chunks=((BLOCK,) * blocks, *((size,) for size in shape)),
        new_axis=list(range(1, len(shape) + 1)),
        dtype=np.float32,
    )


def loop_s(model: nn.Module, shape: tuple[int, ...], numbers: Sequence[int]) -> float:
    """Seconds of a plain loop over blocks."""
    began, outputs = time.perf_counter(), []
    with torch.inference_mode():
        for number in numbers:
            x = torch.from_numpy(block_of(number, shape))
            outputs += [model(batch).numpy() for batch in x.split(BATCH)]
    return time.perf_counter() - began


def worker_loop_s(
    packed: PackedModel, shape: tuple[int, ...], numbers: Sequence[int]
) -> float:
    """The same on a worker, which returns freed memory at once by default."""
    with freed_memory_kept():
        return loop_s(packed.module(), shape, numbers)


def measured(
    model: nn.Module, shape: tuple[int, ...], blocks: int, client: Client
) -> dict[str, float]:
    alone_s = loop_s(model, shape, range(blocks))
    packed = PackedModel(model)
    loops = [
        client.submit(
            *(worker_loop_s, packed, shape, range(rank, blocks, WORKERS)),
            workers=[worker],
            pure=False,
        )
        for rank, worker in spread(client, WORKERS).items()
    ]
    apart_s = max(client.gather(loops))
    began = time.perf_counter()
    lazy = lazy_blocks(shape, blocks)
    outputs = daskdl.predict(model, lazy, client=client, batch_size=BATCH)
    done: Any = client.persist(outputs)
    wait(done)
    together_s = time.perf_counter() - began
    rows = blocks * BLOCK
    return {
        "alone": rows / alone_s,
        "apart": rows / apart_s,
        "together": rows / together_s,
        "limit": alone_s / apart_s,
        "ratio": alone_s / together_s,
        "overhead_ms": 1e3 * WORKERS * (together_s - apart_s) / rows * 10_000,
    }


@contextlib.contextmanager
def _set_up(
    asked: argparse.Namespace,
) -> Iterator[tuple[Client, dict[str, tuple[nn.Module, tuple[int, ...]]]]]:
    """A client, and the models with the shapes of their rows."""
    torch.set_num_threads(1)
    with local_client(WORKERS) as client:
        chosen = {name: MODELS[name] for name in asked.models}
        yield client, {n: (make().eval(), shape) for n, (make, shape) in chosen.items()}


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with _set_up(asked) as (client, models):
        for name, (model, shape) in models.items():
            rounds = [
                measured(model, shape, asked.blocks, client)
                for _ in range(asked.rounds + 1)
            ]
            yield {"case": name, "rows": asked.blocks * BLOCK, **medians(rounds[1:])}


IN_MEMORY_TEXT = """Prediction of rows in the client's memory, beside one process.

Question: How much faster do two workers predict rows that the client sends them?
Counted:  As in `predict`, with numpy outputs in the client's memory. The client sends
          rows through the scheduler ("relayed"), or to the workers ("direct",
          ``Client(direct_to_workers=True)``). Processor time: seconds of this process,
          which contains client and scheduler, and of the workers.
Run:      python -m benchmarks predict-in-memory --rounds 5
"""


def processor_s() -> tuple[float, float]:
    """Of this process so far, and of the processes that it has started."""
    here = psutil.Process()
    addressed, *others = (
        sum(process.cpu_times()[:2])
        for process in (here, *here.children(recursive=True))
    )
    return addressed, sum(others)


def sent(model: nn.Module, X: np.ndarray, client: Client) -> dict[str, float]:
    began, before = time.perf_counter(), processor_s()
    with torch.inference_mode():
        batches = torch.from_numpy(X).split(BATCH)
        np.concatenate([model(batch).numpy() for batch in batches])
    middle, between = time.perf_counter(), processor_s()
    daskdl.predict(model, X, client=client, batch_size=BATCH)
    end, after = time.perf_counter(), processor_s()
    return {
        "alone": len(X) / (middle - began),
        "together": len(X) / (end - middle),
        "ratio": (middle - began) / (end - middle),
        "cpu_alone_s": between[0] - before[0],
        "cpu_here_s": after[0] - between[0],
        "cpu_workers_s": after[1] - between[1],
    }


def in_memory_rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with (
        _set_up(asked) as (client, models),
        Client(client.cluster, direct_to_workers=True, set_as_default=False) as direct,
    ):
        for name, (model, shape) in models.items():
            X = np.concatenate([block_of(i, shape) for i in range(asked.blocks)])
            for way, connected in (("relayed", client), ("direct", direct)):
                rounds = [sent(model, X, connected) for _ in range(asked.rounds + 1)]
                case = {"case": f"{name}, {way}", "rows": len(X)}
                yield case | medians(rounds[1:])


OPTIONS = {
    "--rounds": 5,
    "--blocks": {"type": int, "default": 32, "help": f"of {BLOCK} rows"},
    "--models": {"nargs": "*", "default": list(MODELS), "choices": MODELS},
}
QUESTION = Question(
    "predict",
    __doc__,
    rows,
    "case rows:, alone:,.0f apart:,.0f together:,.0f limit:.2f ratio:.2f "
    "overhead_ms:,.0f",
    OPTIONS,
)
IN_MEMORY = Question(
    "predict-in-memory",
    IN_MEMORY_TEXT,
    in_memory_rows,
    "case rows:, alone:,.0f together:,.0f ratio:.2f cpu_alone_s:.2f cpu_here_s:.2f "
    "cpu_workers_s:.2f",
    OPTIONS,
)
