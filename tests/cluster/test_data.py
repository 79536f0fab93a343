"""Every kind of data is trained on, each row once."""

import dask.array as da
import numpy as np
import pytest
import torch
from distributed import get_worker
from torch import nn

from daskdl import AdaptiveThreshold
from tests.support.problems import kept, plain, rows, trainer
from tests.support.recording import Notes, vector

X, Y = rows()
RAGGED = (30, 0, 97, 61, 150, 142)


def blocks():
    return da.from_array(X, chunks=(RAGGED, 20)), da.from_array(Y, chunks=(RAGGED,))


KINDS = {
    "numpy": lambda: (X, Y),
    "torch": lambda: (torch.from_numpy(X), torch.from_numpy(Y)),
    "dask": blocks,
}


class TestKindsOfData:
    @pytest.mark.slow
    @pytest.mark.parametrize("kind", KINDS)
    def test_learns_scores_and_predicts(self, client, kind):
        x, y = KINDS[kind]()
        own = trainer(client)

        own.fit(x, y, epochs=5, batch_size=8)

        score = own.evaluate(x, y)
        assert score["accuracy"] > 0.9
        outputs = own.predict(x)
        assert type(outputs) is type(x)
        if kind == "dask":
            outputs = client.compute(outputs).result()
        guesses = np.asarray(outputs).argmax(axis=1)
        assert (guesses == Y).mean() == pytest.approx(score["accuracy"], abs=1e-12)

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_row_is_trained_on_once_in_each_epoch(self, client, kind, tmp_path):
        x, _ = KINDS[kind]()
        numbers = np.arange(480, dtype=np.float32) ** 2
        targets = {"numpy": numbers, "torch": torch.from_numpy(numbers)}
        targets["dask"] = da.from_array(numbers, chunks=(RAGGED,))
        notes = Notes(tmp_path)

        history = trainer(
            client, loss=lambda o, y: y.mean() + 0 * o.sum(), callbacks=[notes]
        ).fit(x, targets[kind], epochs=2, batch_size=7)

        # The mean of numbers of which no two are equal: one too few would show.
        assert history.column("loss") == pytest.approx([numbers.mean()] * 2, rel=1e-6)
        assert history.column("examples") == [480, 480]
        assert {line["replica"] for line in notes.read()} == {0, 1}

    def test_tasks_of_blocks_find_the_worker_that_runs_them(self, client):
        def of_worker(block):
            assert get_worker().address.startswith("tcp://")
            return block

        x, y = blocks()

        history = trainer(client).fit(x.map_blocks(of_worker, meta=X), y)

        assert history.column("examples") == [480]

    def test_numpy_and_torch_are_the_same_data(self, client):
        results = []
        for kind in ("numpy", "torch"):
            own = trainer(client, master=kept(max_staleness=0))
            own.fit(*KINDS[kind](), epochs=2)
            results.append(vector(own.model_))

        assert torch.equal(*results)

    def test_a_regression_of_floats(self, client):
        targets = (X @ np.linspace(-1, 1, 20)[:, None]).astype("float64")
        own = trainer(
            client,
            model=lambda: nn.Linear(20, 1),
            loss=nn.MSELoss(),
            optimizer=plain,
            master=kept(threshold=AdaptiveThreshold(initial=1e-2)),
        )

        history = own.fit(
            X, targets, epochs=8, batch_size=16, validation=(X[:50], targets[:50])
        )

        assert history[-1]["val_loss"] < 0.05 * targets.var()
        assert "val_accuracy" not in history[-1]
        assert own.evaluate(X, targets).keys() == {"loss"}
