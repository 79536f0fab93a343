"""Injected failures on workers that are processes."""

import os

import dask.config
import numpy as np
import pytest
from distributed.utils_test import poll_for

from daskdl import FailureInjection
from tests.support.clusters import Script, TookPart, enough, nothing
from tests.support.problems import kept, rows, trainer
from tests.support.recording import Recorded, records

pytestmark = pytest.mark.slow

X, Y = rows()
ROUTINGS = pytest.mark.parametrize("routing", ["plain", "mesh"])


def test_a_replica_that_exits_is_replaced(three, tmp_path):
    pids = three.run(os.getpid)
    worker = sorted(pids)[1]
    rule = FailureInjection("exit", replicas=[1], steps=[12])

    took_part = TookPart(tmp_path)
    script = Script((took_part.by(3), enough))
    script.run(trainer(three, callbacks=[rule, took_part]), X, Y)

    # What it was at when it ended, another has trained on again.
    assert sum(row["repeated_pieces"] for row in script.rows) >= 1
    poll_for(lambda: len(three.nthreads()) == 3, timeout=60, period=0.1)
    after = three.run(os.getpid)
    assert pids[worker] not in after.values()
    assert {pids[w] for w in pids if w != worker} <= set(after.values())


def test_a_replica_that_freezes_too_long_is_replaced(three, tmp_path):
    rule = FailureInjection("freeze", replicas=[1], steps=[12], seconds=10)
    own = trainer(three, master=Recorded(str(tmp_path), kept()), callbacks=[rule])

    with dask.config.set({"daskdl.timeouts.silence": "4s"}):
        Script((2, nothing), (3, enough)).run(own, X, Y)

    last = max(int(path.stem.split("-")[1]) for path in tmp_path.glob("3-[0-9]*.npz"))
    ends = records(tmp_path, last)
    assert sorted(ends) == [0, 2, 3]
    np.testing.assert_array_equal(ends[0]["shared"], ends[3]["shared"])


@ROUTINGS
def test_dropped_updates_are_retransmitted(client, tmp_path, routing):
    rule = FailureInjection("drop", replicas=[0], probability=0.3, seed=1)
    master = Recorded(str(tmp_path), kept(routing=routing))

    history = trainer(client, master=master, callbacks=[rule]).fit(
        X, Y, epochs=2, batch_size=16
    )

    ends = records(tmp_path, epoch=1)
    published = [tuple(stamp) for stamp in ends[0]["published"]]
    received = [tuple(stamp) for stamp in ends[1]["received"]]
    lost = [number for _, number in published if rule.strikes(0, number, 1)]
    assert sorted(received) == published
    assert sum(history.column("repaired_updates")) >= len(lost) > 0
    for end in ends.values():
        np.testing.assert_array_equal(end["shared"], ends[0]["shared"])
        np.testing.assert_allclose(end["shared"], end["expected"], rtol=0, atol=6e-6)
