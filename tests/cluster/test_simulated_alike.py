"""The simulation itself: the same scenario on real processes ends in the same state."""

import os
import signal
import threading

import numpy as np
import pytest

from daskdl import (
    Callback,
    FixedThreshold,
    GradientSharing,
    KeepResidual,
    ParameterAveraging,
    Trainer,
)
from tests.sim.fit import Parts, Setup, Weights, mean_output, sgd
from tests.sim.scenario import START, Cluster, Fate, Fault, Scenario

MASTERS = {
    "sharing": GradientSharing(
        FixedThreshold(2.0**-6),
        KeepResidual(),
        max_staleness=0,
        exchange_every=1,
    ),
    "averaging": ParameterAveraging(frequency=1),
}
FROZEN_S = 1.0


class Freeze(Callback):
    """Freezes a process for a while after the first epoch; belongs to the client."""

    runs_on_workers = False

    def __init__(self, pid):
        self._pid = pid

    def on_epoch_end(self, row):
        if row["epoch"] == 0:
            os.kill(self._pid, signal.SIGSTOP)
            threading.Timer(FROZEN_S, os.kill, (self._pid, signal.SIGCONT)).start()


def simulated(setup):
    """The parameters after a simulated fit of which a worker is frozen for a while."""
    fault = Fault(START, 0, 0.3, "freeze", 0, FROZEN_S, aimed=False)
    scenario = Scenario(0, setup, 2e-3, [fault])
    cluster = Cluster(scenario.seed, setup)
    fate = Fate(scenario, cluster)
    try:
        cluster.fit(60.0)
        assert fate.happened == ["freeze"]
        parameters = cluster.client.model.parameters
    finally:
        cluster.close()
    if parameters.shared_N is not None:
        # The module's float32 has no room for odd steps of the grid beyond 1.
        return (parameters.shared_N * parameters.grid).astype(np.float32)
    return parameters.exact["weight"].numpy()


@pytest.mark.parametrize(
    "master",
    [
        pytest.param(MASTERS["sharing"], id="sharing"),
        pytest.param(MASTERS["averaging"], id="averaging", marks=pytest.mark.slow),
    ],
)
def test_a_frozen_worker_changes_nothing_in_lockstep(client, master):
    setup = Setup(workers=2, master=master, epochs=3, lengths=(24, 40, 32), seed=5)
    pid = client.run(os.getpid)[max(client.nthreads())]

    fitted = Trainer(
        Weights(),
        loss=mean_output,
        optimizer=sgd,
        master=master,
        client=client,
        seed=setup.seed,
        callbacks=[Freeze(pid)],
    )
    fitted.fit(Parts(setup.lengths, setup.seed), epochs=3, batch_size=setup.batch_size)

    weight = fitted.model_.weight.detach().numpy()
    np.testing.assert_array_equal(weight, simulated(setup))
    assert not np.array_equal(weight, Weights().weight.detach().numpy())
