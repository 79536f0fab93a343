"""What a user hears of a run: its history, callbacks, a bar."""

import math
import os
import threading

import dask.array as da
import numpy as np
import pytest
import torch

from daskdl import Callback, ReplicaError
from daskdl.history import COLUMNS
from tests.support.problems import normalised, rows, trainer
from tests.support.recording import Notes

X, Y = rows()

KINDS = {
    "numpy": lambda: (X, Y),
    "torch": lambda: (torch.from_numpy(X), torch.from_numpy(Y)),
    "dask": lambda: (da.from_array(X, chunks=(97, 20)), da.from_array(Y, chunks=97)),
}


class TestHistory:
    def test_it_has_its_columns(self, client):
        own = trainer(client)

        history = own.fit(X, Y, epochs=3, batch_size=16)

        assert history is own.history_
        assert len(history) == 3
        assert all(row.keys() == COLUMNS.keys() for row in history)
        assert history.column("epoch") == [0, 1, 2]
        for row in history:
            assert row["examples_per_s"] == pytest.approx(480 / row["seconds"])
            assert 0 < row["density"] <= 1
            assert row["received_bytes"] == row["sent_bytes"] > 0  # of two replicas
            assert row["dense_bytes"] > row["sent_bytes"]
            assert row["waits"].keys() >= {"gather", "lease"}
            assert row["repeated_pieces"] == row["refused_messages"] == 0
        frame = history.to_pandas()
        assert list(frame.index) == [0, 1, 2]
        assert list(frame["loss"]) == history.column("loss")

    def test_validation_scores_the_model_of_each_epoch(self, lone_client):
        own = trainer(lone_client)

        history = own.fit(X[:400], Y[:400], epochs=2, validation=(X[400:], Y[400:]))

        score = own.evaluate(X[400:], Y[400:])
        assert history[-1]["val_accuracy"] == score["accuracy"]
        assert history[-1]["val_loss"] == pytest.approx(score["loss"], rel=1e-6)
        assert history[0]["val_loss"] != history[1]["val_loss"]

    @pytest.mark.parametrize("kind", KINDS)
    def test_validation_is_shared_by_the_workers(self, client, kind):
        own = trainer(client, model=normalised)

        history = own.fit(X, Y, epochs=5, batch_size=8, validation=KINDS[kind]())

        scores = history.column("val_accuracy")
        assert scores[-1] > 0.9
        # Every row is scored once: shares of 480.
        assert np.array(scores) * 480 == pytest.approx(np.rint(np.array(scores) * 480))
        assert all(math.isfinite(loss) for loss in history.column("val_loss"))


class TestSteps:
    def test_each_replica_reports_those_that_were_asked_for(self, client, tmp_path):
        notes = Notes(tmp_path)
        own = trainer(client, telemetry_every=3, callbacks=[notes])

        history = own.fit(X, Y, epochs=3, batch_size=8)

        wanted = {
            (line["epoch"], line["replica"], line["number"], line["loss"])
            for line in notes.read()
            if line["number"] % 3 == 0
        }
        columns = ("epoch", "replica", "step", "loss")
        got = [tuple(row[name] for name in columns) for row in history.steps]
        assert set(got) == wanted
        assert len(got) == len(wanted)
        kinds = {"RAW32", "GAPS", "BITMAP", None}  # None: nothing, or no room
        assert set(history.steps.column("kind")) <= kinds
        assert sum(history.steps.column("sent_bytes")) > 0
        assert all(row["step_s"] > row["encode_s"] > 0 for row in history.steps)

    def test_those_of_an_epoch_that_did_not_end_are_there(self, client):
        own = trainer(client, telemetry_every=1, callbacks=[FailAt41()])

        with pytest.raises(ReplicaError, match="enough"):
            own.fit(X, Y, epochs=1000, batch_size=8)

        steps = [r["step"] for r in own.history_.steps if r["replica"] == 1]
        assert steps == list(range(1, 41))


class FailAt41(Callback):
    def on_step_end(self, step):
        if step.replica == 1 and step.number == 41:
            raise RuntimeError("enough")


class Enough(Exception):
    """Raised by a callback on the client."""


class TestCallbacks:
    def test_on_step_end_is_run_on_the_workers_after_each_step(self, client, tmp_path):
        notes = Notes(tmp_path)

        history = trainer(client, callbacks=[notes]).fit(X, Y, epochs=2, batch_size=50)

        lines = notes.read()
        pids = client.run(os.getpid)
        assert {line["pid"] for line in lines} == set(pids.values())
        for epoch, row in enumerate(history):
            of_epoch = [line for line in lines if line["epoch"] == epoch]
            assert sum(line["examples"] for line in of_epoch) == 480
            loss = sum(line["loss"] * line["examples"] for line in of_epoch) / 480
            assert row["loss"] == pytest.approx(loss)
        for replica in (0, 1):
            numbers = [line["number"] for line in lines if line["replica"] == replica]
            assert numbers == list(range(1, len(numbers) + 1))

    def test_on_epoch_end_is_run_on_the_client_and_need_not_travel(self, client):
        class Keep(Callback):
            def __init__(self):
                self.rows = []
                self.lock = threading.Lock()  # cannot be pickled

            def on_epoch_end(self, row):
                with self.lock:
                    self.rows.append(row)

        keep = Keep()
        history = trainer(client, callbacks=[keep]).fit(X, Y, epochs=3)

        assert keep.rows == list(history)

    def test_what_on_epoch_end_raises_stops_the_run_and_reaches_the_caller(
        self, client
    ):
        class Stop(Callback):
            def on_epoch_end(self, row):
                if row["epoch"] == 1:
                    raise Enough("after two")

        own = trainer(client, callbacks=[Stop()])
        with pytest.raises(Enough, match="after two"):
            own.fit(X, Y, epochs=10_000)

        assert len(own.history_) == 2
        assert own.evaluate(X, Y)["loss"] < 1.3


class TestProgress:
    def test_a_bar_counts_the_examples(self, client, capfd):
        trainer(client, progress=True).fit(X, Y, epochs=2)

        shown = capfd.readouterr().err
        assert "960/960" in shown
        assert "epoch=1" in shown

    @pytest.mark.parametrize("progress", [False, None])
    def test_none_is_shown_if_not_wanted_or_not_in_a_terminal(
        self, client, capfd, progress
    ):
        trainer(client, progress=progress).fit(X, Y)

        assert "/480" not in capfd.readouterr().err
