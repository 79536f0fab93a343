"""Runs one after another, and at the same time."""

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from distributed import Client

from tests.support.clusters import at_rest, changed_since, still_left_behind
from tests.support.problems import kept, rows, trainer
from tests.support.recording import vector

X, Y = rows()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_fifty_runs_leave_nothing(client):
    both = [trainer(client, master=kept(routing=r)) for r in ("plain", "mesh")]
    for fitted in 2 * both:  # caches are filled then
        fitted.fit(X[:64], Y[:64], batch_size=8)
    assert still_left_behind(client) == {}
    before = at_rest(client)

    for fitted in 25 * both:
        assert fitted.fit(X[:64], Y[:64], batch_size=8).column("replicas") == [2]

    assert changed_since(client, before) == {}


@pytest.mark.slow
@pytest.mark.parametrize("clients", ["one", "two"])
def test_concurrent_runs_do_not_mix(client, clients, caplog):
    # What Dask says of a client that closes would hold its tasks in the record.
    caplog.set_level(logging.CRITICAL + 1, "distributed.scheduler")
    outsider = client
    if clients == "two":
        outsider = Client(client.scheduler.address, set_as_default=False)
    data = [rows(seed=1), rows(seed=2)]
    alone = [trained(client, *pair, seed) for seed, pair in enumerate(data)]
    assert still_left_behind(client) == {}
    before = at_rest(client)

    try:
        with ThreadPoolExecutor(2) as threads:
            runs = [
                threads.submit(trained, by, *pair, seed)
                for seed, (by, pair) in enumerate(
                    zip((client, outsider), data, strict=True)
                )
            ]
            together = [run.result(timeout=60) for run in runs]
    finally:
        if outsider is not client:
            outsider.close()

    for expected, actual in zip(alone, together, strict=True):
        np.testing.assert_array_equal(expected, actual)
    assert not np.array_equal(*alone)
    assert changed_since(client, before) == {}


def trained(client, x, y, seed):
    """Train in lockstep, so that the result depends only on data and seed."""
    fitted = trainer(client, master=kept(max_staleness=0), seed=seed)
    history = fitted.fit(x, y, epochs=4, batch_size=16)
    assert history.column("examples") == [480] * 4
    assert history.column("refused_messages") == [0] * 4
    return vector(fitted.model_).numpy()
