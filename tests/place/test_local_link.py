"""`LinkThreshold` among threads, between which there is no link."""

import numpy as np
import pytest

from daskdl import LinkThreshold
from daskdl.codec import Kind
from tests.support.problems import kept, parameters_of, rows, trainer
from tests.support.recording import ATOL, Recorded, check_barrier, delivered, records

X, Y = rows()


def by_link(**options):
    return kept(threshold=LinkThreshold(), replicas_per_worker=3, **options)


@pytest.mark.parametrize("options", [{}, {"max_staleness": 0}], ids=str)
def test_all_is_sent_dense_from_the_second_exchange_on(tmp_path, options):
    own = trainer(False, master=Recorded(str(tmp_path), by_link(**options)))

    history = own.fit(X, Y, epochs=3, batch_size=8)

    ends = records(tmp_path, epoch=2)
    expected = ends[0]["start"] + sum(end["progress"] for end in ends.values())
    np.testing.assert_allclose(delivered(own), expected, rtol=0, atol=ATOL)
    for epoch in range(3):
        check_barrier(records(tmp_path, epoch))
    for end in ends.values():
        first, *others = end["kinds"].tolist()
        assert first != Kind.DENSE8
        assert len(others) > 30
        assert set(others) == {Kind.DENSE8}
    assert history.column("density")[1:] == [1.0, 1.0]


def test_runs_in_step_repeat_bit_for_bit():
    runs = []
    for _ in range(2):
        own = trainer(False, master=by_link(max_staleness=0), seed=7)
        history = own.fit(X, Y, epochs=2, batch_size=16)
        runs.append((parameters_of(own.model_), history.column("loss")))

    for name, value in runs[0][0].items():
        np.testing.assert_array_equal(value, runs[1][0][name])
    assert runs[0][1] == runs[1][1]


def test_a_second_fit_measures_anew(tmp_path):
    own = trainer(False, master=Recorded(str(tmp_path), by_link(max_staleness=0)))
    kinds = []
    for _ in range(2):
        own.fit(X, Y, batch_size=8)
        kinds.append([end["kinds"][:2] for end in records(tmp_path, 0).values()])

    for first, second in [pair for fit in kinds for pair in fit]:
        assert (first == Kind.DENSE8, second == Kind.DENSE8) == (False, True)
