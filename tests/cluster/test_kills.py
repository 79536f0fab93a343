"""Processes are killed while checkpoints are written: a complete one is always there.

The suite makes some kills, ``make kills`` fifty. Scheduler, workers and client are
forks of a process that has imported `tests.support.forked`.
"""

import asyncio
import logging
import multiprocessing
import os
import random
import threading
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import dask.config
import pytest
import torch
from distributed import Client, Scheduler, Worker
from distributed.utils_test import poll_for
from torch import nn

from daskdl import Checkpoint
from daskdl.saving.checkpoints import COMMON, Part, Series, complete_at, of_replica
from tests.support.problems import adam, kept, rows, trainer

logger = logging.getLogger(__name__)

CONTEXT = multiprocessing.get_context("forkserver")
WITHIN_S = 60  # a fit is over

WORKERS = 2
EPOCHS = 4
EVERY = "5 steps"  # the second time it is the end of an epoch
ALL = 2 * EPOCHS  # checkpoints
WIDTH = 256  # a checkpoint is a megabyte and more: it is seldom not being written
X, Y = rows(count=320)
TEST_X, TEST_Y = rows(count=1000, seed=0)
CHECKPOINTS = "checkpoints"
RESULT = "result.pt"


def model():
    return nn.Sequential(
        nn.Linear(20, WIDTH),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 4),
    )


def alone(function, log, *args):
    """Run in a process of its own, which says what it has to say in a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    function(*args)


def schedule(address):
    async def serve():
        async with Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler:
            address.send(scheduler.address)
            await scheduler.finished()

    asyncio.run(serve())


def work(address, number, folder):
    async def serve():
        options = {"name": number, "nthreads": 1, "local_directory": folder}
        async with Worker(address, dashboard=False, **options) as worker:
            await worker.finished()

    asyncio.run(serve())


def fit(address, folder, resume, keep_last):
    """Train, and leave the result in a folder."""
    folder = Path(folder)
    with (
        dask.config.set({"daskdl.timeouts.rejoin": "2s"}),
        Client(address, set_as_default=False) as client,
    ):
        client.wait_for_workers(WORKERS, timeout=WITHIN_S)
        fitted = trainer(
            client,
            model=model,
            optimizer=adam,
            master=kept(max_staleness=0),
            callbacks=[Checkpoint(folder / CHECKPOINTS, EVERY, keep_last=keep_last)],
        )
        fitted.fit(X, Y, epochs=EPOCHS, batch_size=16, resume=resume)
        result = {
            "epochs": fitted.history_.column("epoch"),
            "model": fitted.model_.state_dict(),
            "optimizer": fitted.optimizer_.state_dict(),
            **fitted.evaluate(TEST_X, TEST_Y),
        }
        torch.save(result, folder / RESULT)


class Processes:
    """Of one fit, on a cluster of its own.

    Args:
        folder: Of its checkpoints, its result, and its logs.
        resume: As of `Trainer.fit`.
        keep_last: As of `Checkpoint`.

    Attributes:
        scheduler: A process.
        workers: Processes.
        client: A process.
    """

    def __init__(self, folder, resume=None, keep_last=2):
        folder.mkdir(exist_ok=True)
        address, sender = CONTEXT.Pipe(duplex=False)
        self._folder = folder
        self.scheduler = self._start("scheduler", schedule, sender)
        assert address.poll(WITHIN_S)
        place = address.recv()
        self.workers = [
            self._start(f"worker-{i}", work, place, i, str(folder))
            for i in range(WORKERS)
        ]
        self.client = self._start("client", fit, place, str(folder), resume, keep_last)

    def _start(self, name, function, *args):
        log = str(self._folder / f"{name}.log")
        process = CONTEXT.Process(target=alone, args=(function, log, *args), name=name)
        process.start()
        return process

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.kill(self.client, *self.workers, self.scheduler)

    @staticmethod
    def kill(*processes):
        """All at once."""
        for process in processes:
            process.kill()
        for process in processes:
            process.join(WITHIN_S)

    def wait(self):
        """Until the client has ended, well or not."""
        assert wait([self.client.sentinel], WITHIN_S)

    def result(self):
        """What it ended with."""
        self.wait()
        log = self._folder / "client.log"
        assert self.client.exitcode == 0, log.read_text()
        return torch.load(self._folder / RESULT)


pytestmark = pytest.mark.slow


KILLS = int(os.environ.get("DASKDL_KILLS", "12"))
VICTIMS = {
    "client": lambda fit: [fit.client],
    "scheduler": lambda fit: [fit.scheduler],
    "a worker": lambda fit: fit.workers[:1],
    "the other worker": lambda fit: fit.workers[1:],
    "all workers": lambda fit: fit.workers,
}
# Files of a checkpoint that have just come when the time to kill is near.
MOMENTS = ["*", "replica-0.json", "replica-1.json", "common-*", "common.json"]
LATER_S = 0.02  # at most, after such a moment
REST_S = 0.5  # at most, after which those that are left are killed too


class Kill(NamedTuple):
    """Who is killed, and when.

    Attributes:
        victim: One of `VICTIMS`.
        number: Of a checkpoint.
        moment: One of `MOMENTS` of it.
        later_s: After that.
        rest_s: After that all others are killed.
    """

    victim: str
    number: int
    moment: str
    later_s: float
    rest_s: float

    @classmethod
    def of(cls, seed):
        chance = random.Random(seed)
        return cls(
            list(VICTIMS)[seed % len(VICTIMS)],
            chance.randint(2, ALL - 1),
            chance.choice(MOMENTS),
            chance.uniform(0, LATER_S),
            chance.choice([0, 1]) * chance.uniform(0, REST_S),
        )

    def is_near(self, series):
        folder = Path(series.folder(self.number).url)
        return any(folder.glob(self.moment))


def newest(series):
    """Number of the newest whole one, all of which is read."""
    newest = series.newest()
    check_whole(newest)
    return newest.stamp.number


def check_whole(checkpoint):
    """Read all of it: each file has the checksum that it ought to have."""
    for name in (COMMON, *map(of_replica, checkpoint.header["members"])):
        stamp, _ = Part(checkpoint.store, name).read()
        assert stamp == checkpoint.stamp


def files(checkpoint):
    """Files of tensors, whose names have checksums of what is in them."""
    return sorted(
        path.name for path in Path(checkpoint.store.url).glob("*.safetensors")
    )


class Uninterrupted(NamedTuple):
    """What a fit that nobody disturbs leaves.

    Attributes:
        result: See `killable`.
        files: Of each of its checkpoints that is left.
    """

    result: dict
    files: dict


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    with Processes(folder, keep_last=None) as fit:
        result = fit.result()
    series = Series.at(folder / CHECKPOINTS)
    checkpoints = {
        number: complete_at(series.folder(number)) for number in series.numbers()
    }
    assert list(checkpoints) == list(range(1, ALL + 1))
    return Uninterrupted(
        result,
        {number: files(checkpoint) for number, checkpoint in checkpoints.items()},
    )


@pytest.fixture(scope="module")
def broken_off():
    """Whether there was one that was not whole, of each kill."""
    return []


def check_all(series, uninterrupted):
    """What is taken for whole is whole, and what it ought to be."""
    for number in series.numbers():
        checkpoint = complete_at(series.folder(number))
        if checkpoint is not None:
            check_whole(checkpoint)
        if checkpoint is not None and len(checkpoint.header["members"]) == WORKERS:
            assert files(checkpoint) == uninterrupted.files[number]


def check_same(actual, expected):
    for name, tensor in actual["model"].items():
        assert torch.equal(tensor, expected["model"][name]), name
    states = [result["optimizer"]["state"] for result in (actual, expected)]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        for name, value in state.items():
            assert torch.equal(value, states[1][number][name]), (number, name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(KILLS))
def test_the_newest_is_whole_and_leads_to_the_same_end(
    seed, uninterrupted, broken_off, tmp_path
):
    kill = Kill.of(seed)
    series = Series.at(tmp_path / CHECKPOINTS)

    with Processes(tmp_path) as fit:
        poll_for(lambda: kill.is_near(series), WITHIN_S, period=0.001)
        threading.Event().wait(kill.later_s)
        before = series.newest().stamp.number
        fit.kill(*VICTIMS[kill.victim](fit))
        after = newest(series)
        threading.Event().wait(kill.rest_s)
    last = newest(series)

    assert kill.number - 2 <= before <= after <= last
    check_all(series, uninterrupted)
    alike = len(complete_at(series.folder(last)).header["members"]) == WORKERS
    broken_off.append(series.numbers()[-1] > last)
    logger.info("%s: %s, %s, %s, alike %s", kill, before, after, last, alike)
    with Processes(tmp_path, resume=True) as fit:
        result = fit.result()
    assert result["epochs"] == list(range(EPOCHS))
    assert series.newest().header["epoch"] == EPOCHS
    newest(series)
    expected = uninterrupted.result
    if alike:
        check_same(result, expected)
    assert result["accuracy"] >= expected["accuracy"] - (0.0 if alike else 0.05)


def test_many_kills_fell_into_the_writing(broken_off):
    if not broken_off:
        pytest.skip("nobody was killed")
    logger.info("%s of %s kills broke one off", sum(broken_off), len(broken_off))

    # On a loaded machine the kill comes late: then the writing may be over.
    assert sum(broken_off) >= max(1, len(broken_off) // 10)
