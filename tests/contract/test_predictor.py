"""The public interface of a predictor whose replicas are threads of this process."""

import asyncio
import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import dask
import dask.array as da
import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster
from distributed.utils_test import poll_for
from torch import nn
from tornado.ioloop import IOLoop

from daskdl import BusyError, Predictor, Trainer
from daskdl.errors import DataError, ModelError, OptionError, RunError, WaitTimeoutError

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
# Batches of another size may use another matrix kernel, which rounds otherwise.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
WITHIN_S = 20.0
GATE = threading.Event()  # `Gated` models wait for it
ASKED = threading.Event()  # they have got rows


@pytest.fixture
def gate():
    GATE.clear()
    ASKED.clear()
    yield GATE
    GATE.set()
    for thread in threading.enumerate():
        if thread.name.startswith("daskdl-predictor"):
            thread.join(WITHIN_S)  # until then it holds a setting of torch


class Gated(nn.Module):
    def forward(self, x):
        ASKED.set()
        assert GATE.wait(WITHIN_S)
        return x * 2


class Trees(nn.Module):
    def forward(self, x):
        left, right = x["left"], x["right"]
        return {"sum": left + right, "both": (left, right.bfloat16())}


@pytest.fixture
def model():
    """A model that depends on its mode, and whose first layer works in place."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
    ).train()


def outputs_of(model, x):
    with torch.no_grad():
        outputs = model.eval()(torch.tensor(x)).numpy()
    model.train()
    return outputs


def here(model, **options):
    return Predictor(model, client=False, **options)


def gated(queue_limit=4):
    return here(Gated(), replicas=1, batch_limit=4, queue_limit=queue_limit)


def filled(predictor):
    """Calls of 4 rows: two batches are with the replica, and the last one waits."""
    calls = []
    for _ in range(2):
        calls.append(predictor.submit(X[:4]))
        poll_for(calls[-1].running, WITHIN_S)
    return [*calls, predictor.submit(X[:4])]


def submitted_once_there_is_room(predictor):
    answers = []

    def fits():
        with contextlib.suppress(BusyError):
            answers.append(predictor.submit(X[:4]))
        return answers

    poll_for(fits, WITHIN_S / 2)  # before the gate is given up
    return answers[0]


def test_numpy_gets_numpy_and_neither_rows_nor_model_are_changed(model):
    x = X[:5].copy()

    with here(model) as predictor:
        outputs = predictor(x)

    assert type(outputs) is np.ndarray
    np.testing.assert_allclose(outputs, outputs_of(model, X[:5]), **CLOSE)
    np.testing.assert_array_equal(x, X[:5])
    assert model.training


def test_trees_of_tensors_get_trees_of_tensors_with_the_dtypes_of_the_model():
    x = torch.from_numpy(X[:2])

    with here(Trees()) as predictor:
        outputs = predictor({"left": x, "right": x})

    assert outputs["sum"].dtype == torch.float32
    assert outputs["both"][1].dtype == torch.bfloat16
    torch.testing.assert_close(outputs["sum"], x * 2)


def test_threads_and_event_loops_each_get_their_own_outputs(model):
    async def ask(predictor):
        calls = (predictor.acall(X[i : i + 1], WITHIN_S) for i in range(20))
        return await asyncio.gather(*calls)

    with here(model, batch_limit=8) as predictor, ThreadPoolExecutor(16) as threads:
        parts = [X[i : i + 1 + i % 4] for i in range(60)]
        outputs = list(threads.map(predictor, parts))
        awaited = asyncio.run(ask(predictor))

    for part, output in zip(parts, outputs, strict=True):
        np.testing.assert_allclose(output, outputs_of(model, part), **CLOSE)
    expected = outputs_of(model, X[:20])
    np.testing.assert_allclose(np.concatenate(awaited), expected, **CLOSE)


def test_the_predictor_of_a_trainer_answers_as_the_trainer_predicts():
    trainer = Trainer(
        *(nn.Linear(4, 1), nn.MSELoss(), torch.optim.SGD),
        transform=lambda batch: (batch[0] * 2, batch[1]),
        client=False,
    )
    with pytest.raises(OptionError, match="no model_ yet; call fit first"):
        trainer.predictor()
    trainer.model_ = trainer.model

    with trainer.predictor(replicas=1, transform=trainer.transform) as predictor:
        outputs = predictor(X[:8])

    np.testing.assert_allclose(outputs, trainer.predict(X[:8] * 2), **CLOSE)


def test_a_swapped_model_may_have_other_shapes(model):
    wider = nn.Linear(4, 7)

    with here(model) as predictor:
        predictor(X[:1])
        predictor.swap(wider)
        outputs = [predictor(X[:2]) for _ in range(4)]
        with pytest.raises(ModelError, match=r"model must be a torch.nn.Module"):
            predictor.swap("other")

    for output in outputs:
        np.testing.assert_allclose(output, outputs_of(wider, X[:2]), **CLOSE)


# ---- busy and late


def test_calls_beyond_queue_limit_are_refused(gate):
    with gated() as predictor:
        calls = filled(predictor)
        with pytest.raises(
            BusyError, match=r"4 rows are waiting, and 1 more .*=4; call again"
        ):
            predictor.submit(X[:1])
        gate.set()

        np.testing.assert_allclose(calls[2].result(WITHIN_S), X[:4] * 2)
        predictor(X[:4])


def from_a_thread(predictor, timeout_s):
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(predictor, X[:4], timeout_s)
        if timeout_s == WITHIN_S:
            GATE.set()
        return late.result(WITHIN_S)


def from_an_event_loop(predictor, timeout_s):
    async def ask():
        late = asyncio.create_task(predictor.acall(X[:4], timeout_s))
        await asyncio.sleep(0)
        if timeout_s == WITHIN_S:
            GATE.set()
        return await late

    return asyncio.run(ask())


ASKING = pytest.mark.parametrize("ask", [from_a_thread, from_an_event_loop])


@ASKING
def test_with_a_timeout_calls_wait_for_room(gate, ask):
    with gated() as predictor:
        filled(predictor)

        with pytest.raises(BusyError, match="queue_limit=4"):
            ask(predictor, 0.01)
        np.testing.assert_allclose(ask(predictor, WITHIN_S), X[:4] * 2)


@ASKING
def test_a_late_answer_is_an_error(gate, caplog, ask):
    with gated() as predictor:
        with pytest.raises(WaitTimeoutError, match=r"within timeout_s=0\.01; is the"):
            ask(predictor, 0.01)
        gate.set()
        predictor(X[:1])

    assert not caplog.records  # such as that the event loop is closed


def from_a_future(predictor, timeout_s):
    return predictor.submit(X[:4]).result(timeout_s or WITHIN_S)


@pytest.fixture
def address(gate):
    """The scheduler of a worker in this process; the gate is open before they end."""
    options = {"processes": False, "protocol": "tcp://", "dashboard_address": ":0"}
    with LocalCluster(n_workers=1, **options) as cluster:
        yield cluster.scheduler_address
        gate.set()


@pytest.mark.parametrize("ask", [from_a_thread, from_an_event_loop, from_a_future])
def test_calls_end_when_their_client_is_closed(address, ask):
    # A client by address has an event loop of its own, which ends with it.
    client = Client(address, set_as_default=False)
    predictor = Predictor(Gated(), client=client)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, predictor, None)
        assert ASKED.wait(WITHIN_S)
        waiting = predictor.submit(X[:4])

        client.close()

        for call in (asked, waiting):
            with pytest.raises(RunError, match="client is closed"):
                call.result(WITHIN_S)
    predictor.close()


@ASKING
def test_a_call_ends_when_the_event_loop_of_its_client_stops(address, ask):
    loop = asyncio.new_event_loop()
    with ThreadPoolExecutor(2) as threads:
        threads.submit(loop.run_forever)
        result = asyncio.run_coroutine_threadsafe(running_loop(), loop).result(WITHIN_S)
        client = Client(address, loop=result, set_as_default=False)
        predictor = Predictor(Gated(), client=client)
        asked = threads.submit(ask, predictor, None)
        assert ASKED.wait(WITHIN_S)

        loop.call_soon_threadsafe(loop.stop)

        with pytest.raises(RunError, match="client is closed"):
            asked.result(WITHIN_S)
        GATE.set()
        threads.submit(loop.run_forever)
        predictor.close()
        client.close()
        loop.call_soon_threadsafe(loop.stop)
    loop.close()


async def running_loop():
    return IOLoop.current()


def cancel_the_future(predictor, waiting):
    assert waiting.cancel()


def cancel_the_task(predictor, waiting):
    async def ask():
        task = asyncio.create_task(predictor.acall(X[:4], timeout_s=WITHIN_S))
        await asyncio.sleep(0)  # the call is queued
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(ask())


def wait_too_long(predictor, waiting):
    with pytest.raises(WaitTimeoutError, match="no answer within"):
        predictor(X[:4], timeout_s=0.01)


@pytest.mark.parametrize(
    ("leave", "queue_limit"),
    [(cancel_the_future, 4), (cancel_the_task, 8), (wait_too_long, 8)],
)
def test_a_cancelled_call_makes_room(gate, leave, queue_limit):
    with gated(queue_limit) as predictor:
        *_, waiting = filled(predictor)

        leave(predictor, waiting)

        again = submitted_once_there_is_room(predictor)
        gate.set()
        np.testing.assert_allclose(again.result(WITHIN_S), X[:4] * 2)


@pytest.mark.parametrize(
    "wait", [lambda p: p(X[:1]), lambda p: p.swap(nn.Identity()), Predictor.close]
)
def test_a_callback_of_an_answer_must_not_wait_for_another(gate, wait):
    told = Future()

    def after(answer):
        try:
            told.set_result(wait(predictor))
        except RunError as error:
            told.set_exception(error)

    with here(Gated()) as predictor:
        predictor.submit(X[:1]).add_done_callback(after)
        gate.set()

        with pytest.raises(RunError, match="must not wait for answers; use submit"):
            told.result(WITHIN_S)


# ---- rows


def test_rows_may_be_changed_after_the_call(gate):
    x = X[:2].copy()

    with here(Gated()) as predictor:
        answer = predictor.submit(x)
        x[:] = 0
        gate.set()

        np.testing.assert_array_equal(answer.result(WITHIN_S), X[:2] * 2)


class Facts(nn.Module):
    """Returns the number of rows in the batch, and of torch's threads."""

    def forward(self, x):
        leaf = x["a"] if isinstance(x, dict) else x
        facts = torch.tensor([len(leaf), torch.get_num_threads()])
        return facts.expand(len(leaf), 2)


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        (X[:2], torch.from_numpy(X[:2]), True),
        ({"a": X[:2], "b": X[:2]}, {"a": X[:2], "b": X[:2]}, True),
        (X[:2], X[:2, :1], False),
        (X[:2], X[:2].astype(np.float64), False),
        ({"a": X[:2], "b": X[:2]}, {"a": X[:2], "c": X[:2]}, False),
    ],
    ids=["tensor", "dict", "shape", "dtype", "names"],
)
def test_calls_of_one_structure_shape_and_dtype_share_a_batch(first, second, joined):
    with here(Facts(), replicas=1, batch_limit=4, wait_ms=20) as predictor:
        answers = [predictor.submit(x) for x in (first, second)]

        rows = [int(answer.result(WITHIN_S)[0, 0]) for answer in answers]

    assert rows == ([4, 4] if joined else [2, 2])


def test_replicas_share_the_threads_of_torch():
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        with here(Facts(), replicas=2) as predictor:
            assert predictor(X[:1])[0, 1] == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X.tolist(), "X must be a numpy array, a torch tensor .* got a list"),
        (X[:0], r"X must not be empty, got the shape \(0, 4\)"),
        (
            {"a": X, "b": X[:2]},
            r"the same number of rows, .* {\"X\['a'\]\": 64, \"X\['b'\]\": 2",
        ),
        (da.from_array(X), "X must be in memory, got a Dask collection; use predict"),
        (X, "X has 64 rows, but a call .* batch_limit=32; split it"),
    ],
    ids=["list", "empty", "rows", "lazy", "long"],
)
def test_rows_that_cannot_be_used_are_refused(x, message):
    with here(nn.Identity()) as predictor, pytest.raises(DataError, match=message):
        predictor.submit(x)


# ---- errors


class Parameterless(nn.Module):
    def forward(self, x):
        return x.to(next(self.parameters()).device)


class UnprintableError(Exception):
    def __str__(self):
        return self.text  # never set


class Unprintable(nn.Linear):
    def forward(self, x):
        raise UnprintableError


@pytest.mark.parametrize(
    ("model", "columns", "message"),
    [
        (nn.Linear(4, 3), 3, r"failed on 2 rows, X: shape \(2, 3\)"),
        (Unprintable(4, 3), 4, "UnprintableError"),
        (Parameterless(), 4, "StopIteration"),  # asyncio cannot pass it on
    ],
    ids=["shape", "unprintable", "iteration"],
)
def test_an_error_of_the_model_is_raised_with_its_traceback(model, columns, message):
    with here(model) as predictor, pytest.raises(ModelError, match=message) as error:
        predictor(X[:2, :columns], timeout_s=WITHIN_S)

    assert "Traceback (most recent call last)" in error.value.__notes__[0]


def test_outputs_that_are_not_one_row_per_example_are_refused():
    message = r"one row per example, .* \(8,\) for 2 rows"

    with here(nn.Flatten(0)) as predictor, pytest.raises(ModelError, match=message):
        predictor(X[:2], timeout_s=WITHIN_S)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "replicas must be a whole number >= 1, got 0"),
        ({"wait_ms": float("nan")}, "wait_ms must be >= 0 and finite, got nan"),
        ({"queue_limit": 31}, "queue_limit must be a whole number >= 32, got 31"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        here(nn.Identity(), **options)


# ---- closing


def own_threads():
    return {t.name for t in threading.enumerate() if t.name.startswith("daskdl-")}


def test_closing_leaves_no_thread_and_later_calls_fail(model):
    predictor = here(model)
    predictor(X[:1])
    assert own_threads()

    predictor.close()
    predictor.close()

    for ask in (predictor, predictor.submit, lambda x: predictor.swap(model)):
        with pytest.raises(RunError, match="the predictor is closed"):
            ask(X[:1])
    for thread in threading.enumerate():
        if thread.name.startswith("daskdl-predictor"):
            thread.join(WITHIN_S)
    assert own_threads() == set()


def test_closing_waits_for_answers(gate):
    with here(Gated(), replicas=1) as predictor:
        answer = predictor.submit(X[:1])
        threading.Timer(0.01, gate.set).start()

    np.testing.assert_allclose(answer.result(0), X[:1] * 2)


@pytest.mark.parametrize(("stop_s", "wait"), [(1000, False), (0.05, True)])
@pytest.mark.timeout(30)
def test_closing_waits_no_longer_than_stop_and_not_after_an_error(gate, stop_s, wait):
    with dask.config.set({"daskdl.timeouts.stop": stop_s}):
        predictor = here(Gated(), replicas=1)
    answer = predictor.submit(X[:1])

    kind = None if wait else ZeroDivisionError
    predictor.__exit__(kind, kind and kind(), None)

    with pytest.raises(RunError, match="closed before this call was answered"):
        answer.result(0)
