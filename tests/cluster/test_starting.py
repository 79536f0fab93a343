"""Workers that join or fail while a fit begins, and that end after it."""

import atexit
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import dask.config
import pytest
from distributed.utils_test import poll_for

from daskdl.channel import protocol
from daskdl.channel.protocol import NAME
from daskdl.channel.scheduler import ChannelSchedulerPlugin
from tests.support.clusters import Script, cluster_of, enough
from tests.support.problems import rows, trainer

X, Y = rows(count=960)


def before_a_plugin(monkeypatch, client, act):
    """Act once, after workers are chosen and before the run is open."""
    register, acted = client.register_plugin, []

    def act_first(plugin):
        if not isinstance(plugin, ChannelSchedulerPlugin) and not acted:
            acted.append(plugin)
            act()
        return register(plugin)

    monkeypatch.setattr(client, "register_plugin", act_first)
    return acted


def forget_plugin(client):
    """Make Dask register the plugin again, as on a new cluster."""
    client.cluster.scheduler.worker_plugins.pop(NAME, None)


def test_a_worker_that_joins_while_a_fit_begins_is_used(growing, monkeypatch):
    def grow():
        growing.cluster.scale(2)
        poll_for(lambda: len(growing.nthreads()) == 2, timeout=60)

    acted = before_a_plugin(monkeypatch, growing, grow)
    seen = []

    def not_for_ever(row):
        seen.append(row["replicas"])
        return row["replicas"] == 2 or len(seen) > 500

    Script((not_for_ever, enough)).run(trainer(growing), X, Y)

    assert acted
    assert seen[-1] == 2


def test_the_client_sends_the_model_once_for_workers_that_join_later_too(
    growing, monkeypatch
):
    growing.register_plugin(ChannelSchedulerPlugin())
    handlers, numbers = growing.cluster.scheduler.handlers, []
    take = handlers[protocol.PUT]

    async def counting(number, **fields):
        numbers.append(number)
        return await take(number=number, **fields)

    monkeypatch.setitem(handlers, protocol.PUT, counting)
    here = len(growing.nthreads())
    grow = (here, lambda: growing.cluster.scale(here + 1))

    Script(grow, (here + 1, enough)).run(trainer(growing), X, Y)

    assert numbers == [*range(len(numbers))]
    assert numbers


def kill(client, workers):
    pids = client.run(os.getpid)
    for worker in workers:
        os.kill(pids[worker], signal.SIGKILL)


def test_a_worker_that_is_lost_before_the_run_is_open_is_left_out(three, monkeypatch):
    lost = sorted(three.nthreads())[1]
    forget_plugin(three)
    acted = before_a_plugin(monkeypatch, three, lambda: kill(three, [lost]))

    history = trainer(three).fit(X, Y, batch_size=16)

    assert acted
    assert history[0]["replicas"] >= 2
    assert history[0]["examples"] == len(X)


def test_a_worker_ends_without_a_garbage_collection_of_torch(tmp_path):
    note = tmp_path / "frozen"

    def leave_note():
        # What is registered first runs last.
        atexit.register(lambda: note.write_text(str(gc.get_freeze_count())))

    # As a user's are; the end of a fork is another one.
    spawn = {"distributed.worker.multiprocessing-method": "spawn"}
    with dask.config.set(spawn), cluster_of(1) as client:
        client.run(leave_note)
        trainer(client).fit(X, Y, batch_size=16)

    assert int(note.read_text()) > 10_000


CTRL_C = """
import signal
import daskdl  # noqa: F401
from torch import nn
from tests.support.problems import mlp, rows, sgd

signal.signal(signal.SIGINT, signal.default_int_handler)

class Say(daskdl.Callback):
    def on_epoch_end(self, row):
        if row["epoch"] == 2:
            print("it trains", flush=True)

if __name__ == "__main__":
    x, y = rows()
    own = daskdl.Trainer(
        mlp, nn.CrossEntropyLoss(), sgd, progress=False, callbacks=[Say()]
    )
    own.fit(x, y, epochs=10**6)
"""


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_only_the_client(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CTRL_C)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout.readline() == "it trains\n"

    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)

    # Of the client's own, and of what it was waiting for.
    assert errors.count("Traceback (most") <= 2
    assert "multiprocessing" not in errors
    assert errors.endswith("KeyboardInterrupt\n")
