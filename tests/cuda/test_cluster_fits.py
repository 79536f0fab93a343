"""Whole fits on a device, on a cluster of processes."""

import functools
import os
import signal

import numpy as np
import pytest
import torch
from distributed.utils_test import poll_for
from torch import nn

from daskdl import OptionError, ReplicaError
from tests.support import promises
from tests.support.clusters import (
    Script,
    TookPart,
    enough,
    still_left_behind,
)
from tests.support.devices import (
    DEVICE,
    OutOfMemory,
    cluster_on_device,
    tensor_bytes,
)
from tests.support.problems import (
    MASTERS,
    adam,
    kept,
    mlp,
    normalised,
    rows,
    trainer,
)
from tests.support.promises import Interrupt, Place
from tests.support.recording import Recorded, records
from tests.support.watched import note, notes

X, Y = rows()


@pytest.fixture(scope="module")
def shared_client():
    with cluster_on_device(2) as client:
        yield client


@pytest.fixture
def place(client):
    """Two replicas, each in a process of its own, that share the device."""
    return Place(client, replicas=2, device=DEVICE)


class NotedDevices(nn.CrossEntropyLoss):
    """The loss of classes, which notes the device of each process that computes it.

    Args:
        folder: Of the notes.
    """

    def __init__(self, folder):
        super().__init__()
        self.folder = str(folder)

    def forward(self, output, labels):
        note(self.folder, "devices", type=output.device.type)
        return super().forward(output, labels)

    def of(self, client):
        """The types of devices that a client's workers have used, by address."""
        lines = notes(self.folder, "devices")
        return {
            worker: {line["type"] for line in lines if line["pid"] == pid}
            for worker, pid in client.run(os.getpid).items()
        }


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
@MASTERS
def test_replicas_on_one_device_learn(client, master, replicas, tmp_path):
    loss = NotedDevices(tmp_path)
    master = master(replicas_per_worker=replicas)
    fitted = trainer(client, loss=loss, device=DEVICE, master=master)

    history = fitted.fit(X, Y, epochs=6, batch_size=8, validation=(X, Y))

    assert list(loss.of(client).values()) == [{DEVICE.type}] * 2
    assert history.column("replicas") == [2 * replicas] * 6
    assert history[-1]["loss"] < history[0]["loss"] / 2
    assert history[-1]["val_accuracy"] > 0.85
    assert fitted.evaluate(X, Y)["loss"] == pytest.approx(
        history[-1]["val_loss"], rel=1e-4
    )


class TestAgreement:
    def test_shared_is_bit_identical_after_every_epoch(self, place, tmp_path):
        promises.Agreement().test_shared_is_bit_identical_after_every_epoch(
            place, tmp_path
        )


class TestInStep(promises.InStep):
    @pytest.fixture(params=[pytest.param(mlp, marks=pytest.mark.slow), normalised])
    def model(self, request):
        """Each process has a random generator of the device."""
        return request.param


def test_auto_is_one_replica_for_each_device_of_a_worker(client):
    fitted = trainer(client, master=kept(replicas_per_worker="auto"))

    history = fitted.fit(X, Y, batch_size=16)

    assert history[-1]["replicas"] == 2 * max(1, torch.cuda.device_count())


def test_predictions_of_workers_are_those_of_the_cpu(place):
    fitted = place.trainer(model=normalised)
    fitted.fit(X, Y, epochs=2, batch_size=16)
    with torch.no_grad():
        expected = fitted.model_(torch.from_numpy(X))

    predicted = fitted.predict(X)
    with fitted.predictor() as predictor:
        answered = predictor(X[:3])

    np.testing.assert_allclose(predicted, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(answered, expected[:3], rtol=1e-3, atol=1e-4)


def test_a_device_that_a_worker_does_not_have_is_an_error_that_names_the_worker(client):
    missing = f"cuda:{torch.cuda.device_count()}"

    with pytest.raises(
        OptionError, match=rf"replica \d on tcp://\S+: device '{missing}' does not"
    ):
        trainer(client, device=missing).fit(X, Y)


FAILURES = {
    "a fit": {},
    "out of memory": {"model": lambda: OutOfMemory(mlp(), rows=16)},
    "Ctrl-C": {"callbacks": [Interrupt()]},
}
ENDS = {"out of memory": ReplicaError, "Ctrl-C": KeyboardInterrupt}


@pytest.mark.slow
@pytest.mark.parametrize("end", FAILURES)
def test_nothing_stays_on_the_device(place, end, ctrl_c):
    """The second time, so that what is made once for a process is there."""
    fitted = place.trainer(optimizer=adam, **{"model": normalised, **FAILURES[end]})
    fit = functools.partial(fitted.fit, X, Y, epochs=4, batch_size=16)
    if end in ENDS:
        fit = functools.partial(pytest.raises, ENDS[end], fit)
    fit()
    still_left_behind(place.client)
    before = place.client.run(tensor_bytes)

    error = fit()

    if end == "out of memory":
        message = r"replica \d on tcp://\S+: OutOfMemoryError: "
        assert error.match(message)
        assert error.match("allocate_too_much")
    poll_for(lambda: place.client.run(tensor_bytes) == before, timeout=30)
    assert place.trainer().fit(X, Y, batch_size=16)[-1]["replicas"] == 2


class TestNewcomers:
    """The last tests here: the cluster has one worker more."""

    @pytest.fixture
    def add_worker(self, client):
        """Start a worker that sees no CUDA device."""
        options = client.cluster.new_spec["options"]

        def add():
            options["env"] = {"CUDA_VISIBLE_DEVICES": ""}
            client.cluster.scale(3)

        yield add
        del options["env"]

    @pytest.mark.slow
    def test_one_without_a_device_joins_is_killed_and_joins_again(
        self, client, add_worker, tmp_path
    ):
        before = client.run(os.getpid).values()
        took_part, loss = TookPart(tmp_path), NotedDevices(tmp_path)

        def kill():
            (added,) = set(client.run(os.getpid).values()).difference(before)
            os.kill(added, signal.SIGKILL)

        script = Script(
            *((2, add_worker), (took_part.by(2), kill), (took_part.by(3), enough))
        )
        # The fit lasts as long as workers take to start: many steps are rounded.
        master = Recorded(str(tmp_path), kept(), atol=2e-5)
        mixed = trainer(client, loss=loss, master=master, callbacks=[took_part])

        fitted = script.run(mixed, X, Y)

        ends = records(tmp_path, len(script.rows) - 1)
        assert sorted(ends) == [0, 1, 3]
        for replica in (1, 3):
            np.testing.assert_array_equal(ends[0]["shared"], ends[replica]["shared"])
        used = [types.pop() for types in loss.of(client).values()]
        assert sorted(used) == sorted([DEVICE.type, DEVICE.type, "cpu"])
        assert fitted.evaluate(X, Y)["accuracy"] > 0.8
