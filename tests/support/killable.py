"""A fit whose scheduler, workers and client are processes of their own.

They are forks of a process that has imported `tests.support.forked`: so a cluster is
there in a moment, and many can be killed.
"""

import asyncio
import multiprocessing
import os
from multiprocessing.connection import wait
from pathlib import Path

import dask.config
import torch
from distributed import Client, Scheduler, Worker
from torch import nn

from daskdl import Checkpoint, DaskDLError
from tests.support.problems import adam, kept, rows, trainer

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
FAILURE = "failure.txt"


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
    """Train, and leave the result or the failure in a folder."""
    folder = Path(folder)
    with (
        dask.config.set({"daskdl.timeouts.rejoin": "2s"}),
        Client(address, set_as_default=False) as client,
    ):
        client.wait_for_workers(WORKERS, timeout=WITHIN_S)
        own = trainer(
            client,
            model=model,
            optimizer=adam,
            master=kept(max_staleness=0),
            callbacks=[Checkpoint(folder / CHECKPOINTS, EVERY, keep_last=keep_last)],
        )
        try:
            own.fit(X, Y, epochs=EPOCHS, batch_size=16, resume=resume)
        except DaskDLError as error:
            said = "\n".join([repr(error), *getattr(error, "__notes__", ())])
            Path(folder, FAILURE).write_text(said)
            raise
        result = {
            "epochs": own.history_.column("epoch"),
            "model": own.model_.state_dict(),
            "optimizer": own.optimizer_.state_dict(),
            **own.evaluate(TEST_X, TEST_Y),
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

    def failure(self):
        """How the client said that it failed."""
        self.wait()
        return (self._folder / FAILURE).read_text()
