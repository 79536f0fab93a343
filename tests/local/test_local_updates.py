"""What becomes of updates among threads: nothing is lost, all agree, in step."""

import itertools

import numpy as np
import pytest
import torch

from tests.cluster.problems import (
    adam,
    kept,
    mlp,
    normalised,
    parameters_of,
    plain_loop,
    rows,
    sgd,
    trainer,
)
from tests.cluster.recording import Recorded, records, vector

X, Y = rows()


def shared_out(replicas=2, **options):
    """Sharing among so many threads."""
    return kept(replicas_per_worker=replicas, **options)


@pytest.fixture
def one_thread():
    """As the plain loop has it: sums over a batch depend on how they are shared out."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


class TestConservation:
    """Promise 1; each replica checks it after every step."""

    @pytest.mark.parametrize(
        "options",
        [{}, {"exchange_every": 3}, {"max_staleness": 0}, {"max_staleness": None}],
        ids=str,
    )
    def test_at_every_step_and_at_the_end(self, tmp_path, options):
        own = trainer(False, master=Recorded(str(tmp_path), shared_out(3, **options)))

        own.fit(X, Y, epochs=3, batch_size=8)

        ends = records(tmp_path, epoch=2)
        assert sorted(ends) == [0, 1, 2]
        moved = [end["progress"] for end in ends.values()]
        assert all(np.abs(progress).max() > 1e-3 for progress in moved)
        expected = ends[0]["start"] + sum(moved)
        got = vector(own.model_).numpy()
        np.testing.assert_allclose(got, expected, rtol=0, atol=6e-6)


class TestAgreement:
    """Promises 2 and 3."""

    def test_shared_is_bit_identical_after_every_epoch(self, tmp_path):
        master = Recorded(str(tmp_path), shared_out(3))

        trainer(False, master=master).fit(X, Y, epochs=3, batch_size=8)

        for epoch in range(3):
            ends = records(tmp_path, epoch)
            for end in ends.values():
                np.testing.assert_array_equal(end["shared"], ends[0]["shared"])
                np.testing.assert_array_equal(end["shared"], end["expected"])

    @pytest.mark.parametrize("copies", [1, 3])
    def test_each_update_is_received_once(self, tmp_path, copies):
        master = Recorded(str(tmp_path), shared_out(), copies)

        trainer(False, master=master).fit(X, Y, epochs=2, batch_size=16)

        ends = records(tmp_path, epoch=1)
        for one, other in itertools.permutations(ends, 2):
            sent = [tuple(stamp) for stamp in ends[one]["published"]]
            got = [tuple(stamp) for stamp in ends[other]["received"]]
            assert len(sent) > 10
            assert sorted(got) == sorted(sent)

    def test_a_full_inbox_is_folded(self, tmp_path, monkeypatch):
        monkeypatch.setattr("daskdl.trainer.INBOX_BYTES", 1)
        master = Recorded(str(tmp_path), shared_out())

        history = trainer(False, master=master).fit(X, Y, epochs=2, batch_size=16)

        assert sum(history.column("folds")) > 0
        ends = records(tmp_path, epoch=1)
        np.testing.assert_array_equal(ends[0]["shared"], ends[1]["shared"])
        np.testing.assert_array_equal(ends[0]["shared"], ends[0]["expected"])

    def test_nobody_is_further_ahead_than_allowed(self, tmp_path):
        master = Recorded(str(tmp_path), shared_out(max_staleness=2))

        trainer(False, master=master).fit(X, Y, epochs=2, batch_size=8)

        leads = np.concatenate([e["leads"] for e in records(tmp_path, 1).values()])
        assert len(leads) > 50
        assert leads.max() <= 2


class TestRepetition:
    """Promises 5 and 8."""

    @pytest.mark.parametrize("replicas", [2, 3])
    def test_synchronous_runs_repeat_bit_for_bit(self, replicas):
        runs = []
        for _ in range(2):
            master = shared_out(replicas, max_staleness=0)
            own = trainer(False, master=master, seed=7)
            history = own.fit(X, Y, epochs=2, batch_size=16)
            runs.append((parameters_of(own.model_), history.column("loss")))

        for name, value in runs[0][0].items():
            np.testing.assert_array_equal(value, runs[1][0][name])
        assert runs[0][1] == runs[1][1]

    @pytest.mark.parametrize("optimizer", [sgd, adam])
    @pytest.mark.parametrize("model", [mlp, normalised])
    def test_one_replica_equals_a_plain_loop(self, one_thread, model, optimizer):
        own = trainer(False, model=model, optimizer=optimizer, seed=3)
        own.fit(X, Y, epochs=2, batch_size=50, shuffle=False)

        plain = plain_loop(model, optimizer, seed=3, epochs=2, batch_size=50, x=X, y=Y)

        for name, value in parameters_of(own.model_).items():
            np.testing.assert_array_equal(value, plain[name], err_msg=name)

    @pytest.mark.parametrize("optimizer", [sgd, adam])
    def test_two_fits_are_one(self, optimizer):
        models = []
        for fits, epochs in ((1, 2), (2, 1)):
            own = trainer(False, optimizer=optimizer)
            for _ in range(fits):
                own.fit(X, Y, epochs=epochs, batch_size=50, shuffle=False)
            models.append(vector(own.model_))

        assert torch.equal(*models)

    def test_the_optimizer_goes_on_from_fit_to_fit(self):
        own = trainer(False, optimizer=adam, master=shared_out(max_staleness=0))

        steps = []
        for _ in range(2):
            own.fit(X, Y, batch_size=16)
            state = own.optimizer_.state_dict()["state"]
            steps.append([int(entry["step"]) for entry in state.values()])

        assert steps == [[15] * 4, [30] * 4]
