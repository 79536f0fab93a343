"""How far a replica may run ahead of the others: promise 5."""

import time

import numpy as np
import pytest
from distributed import Event

from daskdl import Callback
from tests.support.problems import kept, rows, trainer
from tests.support.recording import Notes, Recorded, records

X, Y = rows()


class Slow(Callback):
    """Makes one replica slower than the other."""

    def on_step_end(self, step):
        if step.replica == 1:
            time.sleep(0.01)  # the slowness itself, not a wait for something


class Overtaken(Callback):
    """Holds one replica at its first step until the other has made twelve."""

    def on_step_end(self, step):
        if step.replica == 0 and step.number == 12:
            Event("overtaken").set()
        if step.replica == 1 and step.number == 1:
            assert Event("overtaken").wait(timeout=30)


class Laggard(Callback):
    """One replica makes eight steps while the other makes forty."""

    def on_step_end(self, step):
        turn, rest = divmod(step.number, 5)
        if step.replica == 0 and rest == 0 and turn <= 8:
            Event(f"fifth step {turn}").set()
        if step.replica == 1 and step.number <= 8:
            assert Event(f"fifth step {step.number}").wait(timeout=30)


class TestBoundedStaleness:
    """Promise 5: nobody runs more than max_staleness steps ahead."""

    @pytest.mark.parametrize("bound", [0, 3])
    def test_no_replica_starts_a_step_further_ahead(self, client, tmp_path, bound):
        master = Recorded(str(tmp_path), kept(max_staleness=bound))

        trainer(client, master=master, callbacks=[Slow()]).fit(X, Y, batch_size=8)

        leads = np.concatenate([end["leads"] for end in records(tmp_path, 0).values()])
        assert leads.max() == bound

    def test_unbounded_is_not_held(self, client):
        history = trainer(
            client, master=kept(max_staleness=None), callbacks=[Overtaken()]
        ).fit(X, Y, batch_size=8)

        assert "staleness" not in history[0]["waits"]
        assert history[0]["staleness"] > 0

    def test_one_that_lags_gets_less_to_do(self, client, tmp_path):
        notes = Notes(tmp_path)
        own = trainer(client, master=kept(max_staleness=None))
        own.callbacks = [notes, Laggard()]

        history = own.fit(X, Y, batch_size=8)

        steps = [line["replica"] for line in notes.read()]
        assert steps.count(0) >= 40  # halves would be thirty each
        assert history[0]["examples"] == len(X)
        assert "staleness" not in history[0]["waits"]
