"""Runs that are equal bit for bit: promises 5 and 8."""

import pytest

from tests.support import promises
from tests.support.problems import kept, mlp, normalised, rows, trainer

pytestmark = pytest.mark.slow

X, Y = rows()


@pytest.mark.parametrize("model", [mlp, normalised])
class TestInStep(promises.InStep):
    pass


def test_another_seed_gives_another_run(client):
    losses = [
        trainer(client, master=kept(max_staleness=0), seed=seed)
        .fit(X, Y, batch_size=16)
        .column("loss")
        for seed in (1, 2)
    ]

    assert losses[0] != losses[1]


class TestOneReplica(promises.OneReplica):
    pass
