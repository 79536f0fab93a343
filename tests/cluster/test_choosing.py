"""Workers that die or come while replicas compare two models at an epoch's end."""

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from distributed import get_worker
from distributed.utils import sync
from distributed.utils_test import poll_for

from daskdl import FixedThreshold
from daskdl.channel.protocol import NAME
from tests.support.clusters import Script, TookPart, cluster_of, enough
from tests.support.problems import kept, mlp, plain, rows, trainer
from tests.support.recording import ATOL, Recorded, records

pytestmark = pytest.mark.slow

X, Y = rows(count=960)
WITHIN_S = 60
FIRST, LAST = 1, 4  # scores of one batch: of three models, and then of what was sent


class Watched(mlp().__class__):
    """Does something before one of its scores in each process but that of the client.

    Nothing else calls it in evaluation mode: the fits have no validation data.
    """

    def __init__(self, folder, number):
        super().__init__(*mlp())
        self.folder, self.number = folder, number
        self.client, self.scores = os.getpid(), 0

    def forward(self, x):
        if not self.training and os.getpid() != self.client:
            self.scores += 1
            if self.scores == self.number:
                self.act()
        return super().forward(x)

    def act(self):
        raise NotImplementedError


class Doomed(Watched):
    """Kills the first process that gets there; no worker takes its place."""

    def act(self):
        try:
            Path(self.folder, "killed").touch(exist_ok=False)
        except FileExistsError:
            return
        worker = get_worker()

        async def do_not_restart():
            async with worker.rpc(worker.nanny) as nanny:
                await nanny.close_gracefully()

        sync(worker.loop, do_not_restart)
        os.kill(os.getpid(), signal.SIGKILL)


class Waiting(Watched):
    """Waits until another replica has joined."""

    def act(self):
        Path(self.folder, "choosing").touch()
        poll_for(Path(self.folder, "joined").exists, WITHIN_S)


def coarse(folder, **options):
    """A master whose residuals are worth delivering."""
    sharing = kept(threshold=FixedThreshold(0.06), **options)
    return Recorded(str(folder), sharing, atol=ATOL)


def check_agreement(folder, epoch, replicas):
    ends = records(folder, epoch)
    assert len(ends) == replicas
    first, *others = (end["shared"] for end in ends.values())
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("routing", ["plain", "mesh"])
@pytest.mark.parametrize("number", [FIRST, LAST])
def test_a_worker_is_killed_while_models_are_compared(tmp_path, number, routing):
    with cluster_of(3) as client:
        own = trainer(
            client,
            model=lambda: Doomed(str(tmp_path), number),
            optimizer=plain,
            master=coarse(tmp_path, routing=routing, max_staleness=0),
        )

        history = own.fit(X, Y, epochs=4, batch_size=8)

    assert (tmp_path / "killed").exists()
    first = history[0]
    assert first["replicas"] == 2
    # What was sent is not used if its replica is gone.
    assert first["delivered"] == (number == FIRST)
    assert any(history.column("delivered"))
    check_agreement(tmp_path, 3, history[-1]["replicas"])
    assert history[-1]["loss"] < history[0]["loss"]


@pytest.mark.parametrize("number", [FIRST, LAST])
def test_a_worker_joins_while_models_are_compared(tmp_path, number):
    took_part = TookPart(tmp_path)

    def grow(client):
        poll_for((tmp_path / "choosing").exists, WITHIN_S)
        client.cluster.scale(3)

        def present(dask_scheduler):
            runs = dask_scheduler.extensions[NAME].runs.values()
            return [len(run.state.members.present) for run in runs]

        # The third is present from its request for a snapshot on.
        poll_for(lambda: client.run_on_scheduler(present) == [3], WITHIN_S)
        (tmp_path / "joined").touch()

    with cluster_of(2) as client:
        thread = threading.Thread(target=grow, args=[client])
        thread.start()
        script = Script((took_part.by(2), lambda: None), (3, enough))
        script.run(
            trainer(
                client,
                model=lambda: Waiting(str(tmp_path), number),
                optimizer=plain,
                master=coarse(tmp_path),
                callbacks=[took_part],
            ),
            X,
            Y,
        )
        thread.join()

    first, *_, last = script.rows
    assert first["replicas"] == 2
    # A replica that has joined already has a snapshot without the residuals.
    assert first["delivered"] == (number == LAST)
    check_agreement(tmp_path, len(script.rows) - 1, 3)
    assert last["loss"] < first["loss"]
