"""Runs among threads that end early: failures, divergence, Ctrl-C."""

import dataclasses
import gc
import re
import threading
import weakref

import dask
import numpy as np
import pytest
import torch
from distributed.utils_test import poll_for

from daskdl import Callback, ModelError, ReplicaError, RunError, WaitTimeoutError
from daskdl.channel.local import LocalChannel
from daskdl.observe.tables import StepRow
from daskdl.observe.timeline import SpanLog
from daskdl.training.backend import LocalBackend
from daskdl.training.base import Parameters
from daskdl.training.state import ReplicaState, decoded
from daskdl.training.telemetry import LayerLog, StepLog, telemetry_of
from tests.support.problems import adam, kept, rows, trainer
from tests.support.promises import EarlyEnds, FailAt, Interrupt, Place
from tests.support.recording import Recorded, vector

X, Y = rows()
TWO = kept(replicas_per_worker=2)


@pytest.fixture
def place():
    """Two replicas among threads of this process."""
    return Place(False, replicas=2, per_worker=2)


@pytest.fixture(autouse=True)
def nothing_left():
    """No thread of a replica is left; a stopped one may take a moment."""
    yield
    poll_for(
        lambda: not any(t.name.startswith("daskdl") for t in threading.enumerate()),
        timeout=30,
    )


class OwnError(ModelError):
    """An exception of the user, derived from an error of daskdl."""


OPENED = []


class Unpacked(Exception):
    """An exception of the user that notes that it is unpickled."""

    def __reduce__(self):
        return OPENED.append, ("unpickled",)


class TwoTexts(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class KeyError2(KeyError):
    """Has the name of no built-in exception."""


class Unprintable(Exception):
    def __str__(self):
        return self.text  # never set


def undecodable():
    return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text")


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: KeyError("wanted"), KeyError),
        (lambda: KeyError(3), KeyError),
        (lambda: FileNotFoundError(2, "no file", "rows.csv"), FileNotFoundError),
        (undecodable, None),  # it cannot be made from a text
        (lambda: OwnError("wanted"), None),
        (lambda: Unpacked("wanted"), None),
        (lambda: TwoTexts("one", "two"), None),
        (lambda: KeyError2("wanted"), None),
    ],
)
def test_the_caller_gets_an_exception_as_text_and_a_built_in_one_as_the_cause(
    make, cause
):
    def fail():
        error = make()
        error.add_note("in the last step")
        raise error

    failing = trainer(False, master=TWO, callbacks=[FailAt(fail)])

    with pytest.raises(ReplicaError) as caught:
        failing.fit(X, Y, epochs=100)

    message, error = str(caught.value), make()
    assert message.startswith(f"replica 1 on this machine: {type(error).__name__}: ")
    assert str(error) in message
    assert "raise self.make()" in message  # the very line
    assert "in the last step" in message
    raised_from = caught.value.__cause__
    assert (raised_from and type(raised_from)) is cause
    assert raised_from is None or str(raised_from) == str(error)
    assert OPENED == []


def test_an_exception_without_a_readable_text_ends_the_fit_with_the_name_of_its_class():
    failing = trainer(False, master=TWO, callbacks=[FailAt(Unprintable)])

    with pytest.raises(ReplicaError, match=r"replica 1 .*: Unprintable ") as caught:
        failing.fit(X, Y, epochs=100)

    assert "raise self.make()" in str(caught.value)


@pytest.mark.parametrize("where", ["worker", "client"])
def test_a_failed_fit_holds_nothing_of_the_data_without_a_collection(where, ctrl_c):
    fail = FailAt(lambda: KeyError("wanted")) if where == "worker" else Interrupt()
    # Whoever makes torch's first optimizer in a process is remembered by an import.
    torch.optim.SGD([torch.zeros(1)])
    x = X.copy()
    held = weakref.ref(x)
    gc.collect()
    gc.disable()  # what holds itself would stay until some collection
    try:
        try:
            trainer(False, master=TWO, callbacks=[fail]).fit(x, Y, epochs=100)
        except (ReplicaError, KeyboardInterrupt):
            del x
        else:
            pytest.fail("the fit did not fail")
        poll_for(lambda: held() is None, timeout=30)
    finally:
        gc.enable()


def test_an_exception_of_a_client_callback_stops_the_run():
    class Stop(Callback):
        def on_epoch_end(self, row):
            raise ZeroDivisionError

    interrupted = trainer(False, master=TWO, callbacks=[Stop()])

    with pytest.raises(ZeroDivisionError):
        interrupted.fit(X, Y, epochs=100)

    assert len(interrupted.history_) == 1


class TestEarlyEnds(EarlyEnds):
    pass


def test_after_ctrl_c_the_model_is_what_was_agreed_on(ctrl_c, tmp_path):
    master = Recorded(str(tmp_path), TWO)
    interrupted = trainer(False, master=master, callbacks=[Interrupt()])

    with pytest.raises(KeyboardInterrupt):
        interrupted.fit(X, Y, epochs=10_000, batch_size=16)

    assert len(interrupted.history_) == 1
    shared = [np.load(path)["shared"] for path in tmp_path.glob("0-*[0-9].npz")]
    model = vector(interrupted.model_).numpy()
    assert any(np.array_equal(model, agreed) for agreed in shared)


class Hang(Callback):
    """Replica 0 waits in its second step until it is let go; the other for that."""

    hangs = release = None

    def on_step_end(self, step):
        if step.replica == 0 and step.number == 2:
            Hang.hangs.set()
            Hang.release.wait(60)
        elif step.replica == 1:
            Hang.hangs.wait(60)


@pytest.fixture
def hang():
    """It is let go in the end, and leaves."""
    Hang.hangs, Hang.release = threading.Event(), threading.Event()
    yield Hang()
    Hang.release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("daskdl"):
            thread.join(20)


def test_one_that_hangs_is_left_behind_with_a_warning(hang, caplog):
    failing = trainer(False, master=TWO, callbacks=[hang, FailAt(RuntimeError, 1)])

    with (
        dask.config.set({"daskdl.timeouts.stop": "1s"}),
        pytest.raises((ReplicaError, RunError)),
    ):
        failing.fit(X, Y, batch_size=16)

    assert re.search(
        r"a replica has not ended within 1 s \(daskdl\.timeouts\.stop\): replica 0 on "
        r"this machine, last seen at step [12], update \d, \d\.\d s ago",
        caplog.text,
    )


class TestBackend:
    """A fit whose backend fails."""

    @pytest.fixture
    def closed(self, monkeypatch):
        """Calls of `close`, of backends that the test has changed."""
        calls = []

        def change(**methods):
            def close(self):
                calls.append(self)
                LocalBackend.close(self)

            kind = type("Changed", (LocalBackend,), {**methods, "close": close})
            monkeypatch.setattr("daskdl.training.fit.LocalBackend", kind)

        self.change = change
        return calls

    def test_a_backend_that_cannot_start_is_closed(self, closed):
        def start(self):
            raise WaitTimeoutError("no answer")

        self.change(start=start)

        with pytest.raises(WaitTimeoutError, match="no answer"):
            trainer(False, master=TWO).fit(X, Y, batch_size=16)

        assert len(closed) == 1

    def test_a_fetched_state_replaces_a_result_without_parameters(self, closed):
        whole = trainer(False, master=TWO, telemetry_every=1)
        whole.fit(X, Y, batch_size=16)
        brought = Parameters.of(whole.model_)

        def collect(self):
            result = LocalBackend.collect(self)
            late = StepLog(every=1)
            assert late.begin_row(10**6)
            late.add(StepRow(epoch=1, step=10**6, replica=0, loss=0.5))
            telemetry = [telemetry_of(late, LayerLog(0, None), SpanLog(0))]
            return dataclasses.replace(
                result, parameters=Parameters(), telemetry=telemetry
            )

        state = ReplicaState({"epoch": 1}, {"model": brought.values()}, {})
        self.change(collect=collect, agreed=property(lambda self: state))
        interrupted = trainer(False, master=TWO, telemetry_every=1)

        with pytest.raises(RunError, match="was lost") as caught:
            interrupted.fit(X, Y, batch_size=16)

        assert "after epoch 0, the latest" in caught.value.__notes__[0]
        for name, value in interrupted.model_.state_dict().items():
            assert torch.equal(value, whole.model_.state_dict()[name])
        assert interrupted.history_.steps[-1]["step"] == 10**6


def test_only_the_first_replica_copies_its_optimizer_for_the_client(monkeypatch):
    kept = []

    def keep_state(channel, epoch, make):
        if make is not None:
            kept.append(decoded(make()))

    monkeypatch.setattr(LocalChannel, "has_client", True)
    monkeypatch.setattr(LocalChannel, "keep_state", keep_state)

    trainer(False, master=TWO, optimizer=adam).fit(X, Y, epochs=1, batch_size=16)

    complete, lacking = sorted(kept, key=lambda s: s.header["lacks_optimizer"])
    assert not complete.header["lacks_optimizer"]
    assert lacking.header["lacks_optimizer"]
    optimizers = [state.per_replica["optimizer"] for state in (complete, lacking)]
    assert optimizers[0]["state"]
    assert optimizers[1] == {**optimizers[0], "state": {}}
