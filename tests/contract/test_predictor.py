import asyncio
import inspect
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import dask
import dask.array as da
import numpy as np
import pytest
import torch
from torch import nn

from daskdl import BusyError, Predictor, Trainer
from daskdl.errors import DataError, ModelError, OptionError, RunError, WaitTimeoutError

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
# Batches of another size may use another matrix kernel, which rounds otherwise.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
WITHIN_S = 20.0
GATE = threading.Event()  # what `Gated` models wait for


@pytest.fixture
def gate():
    GATE.clear()
    yield GATE
    GATE.set()


class Gated(nn.Module):
    def forward(self, x):
        assert GATE.wait(WITHIN_S)
        return x * 2


class Trees(nn.Module):
    def forward(self, x):
        left, right = x["left"], x["right"]
        return {"sum": left + right, "both": (left, right.bfloat16())}


@pytest.fixture
def model():
    """Sensitive to its mode: dropout and batch norm; and works in place first."""
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


def test_numpy_gets_numpy_and_nothing_of_the_callers_is_changed(model):
    x = X[:5].copy()

    with here(model) as predictor:
        outputs = predictor(x)

    assert type(outputs) is np.ndarray
    np.testing.assert_allclose(outputs, outputs_of(model, X[:5]), **CLOSE)
    np.testing.assert_array_equal(x, X[:5])
    assert model.training


def test_trees_of_tensors_get_such_with_the_dtypes_that_the_model_gave():
    x = torch.from_numpy(X[:2])

    with here(Trees()) as predictor:
        outputs = predictor({"left": x, "right": x})

    assert outputs["sum"].dtype == torch.float32
    assert outputs["both"][1].dtype == torch.bfloat16
    torch.testing.assert_close(outputs["sum"], x * 2)


def test_many_threads_get_each_their_own(model):
    with here(model, batch_limit=8) as predictor, ThreadPoolExecutor(16) as threads:
        parts = [X[i : i + 1 + i % 4] for i in range(60)]
        outputs = list(threads.map(predictor, parts * 3))

    for part, output in zip(parts * 3, outputs, strict=True):
        np.testing.assert_allclose(output, outputs_of(model, part), **CLOSE)


def test_event_loops_await_their_answers(model):
    async def ask(predictor):
        calls = (predictor.acall(X[i : i + 1], WITHIN_S) for i in range(20))
        return await asyncio.gather(*calls)

    with here(model) as predictor:
        outputs = asyncio.run(ask(predictor))

    np.testing.assert_allclose(
        np.concatenate(outputs), outputs_of(model, X[:20]), **CLOSE
    )


def test_a_trainer_has_one_that_answers_as_it_predicts():
    def doubled(batch):
        return batch[0] * 2, batch[1]

    trainer = Trainer(
        nn.Linear(4, 1),
        nn.MSELoss(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        transform=doubled,
        client=False,
        progress=False,
    )
    with pytest.raises(OptionError, match="no model_ yet; call fit first"):
        trainer.predictor()
    trainer.fit(X, X[:, :1], epochs=1)

    with trainer.predictor(replicas=1, transform=doubled) as predictor:
        outputs = predictor(X[:8])

    np.testing.assert_allclose(outputs, trainer.predict(X[:8] * 2), **CLOSE)


def test_another_model_answers_what_is_asked_after_it_was_swapped(model):
    other = nn.Linear(4, 7)

    with here(model) as predictor:
        predictor(X[:1])
        predictor.swap(other)
        outputs = [predictor(X[:2]) for _ in range(4)]
        with pytest.raises(ModelError, match=r"model must be a torch.nn.Module"):
            predictor.swap("other")

    for output in outputs:
        np.testing.assert_allclose(output, outputs_of(other, X[:2]), **CLOSE)


def test_no_call_is_answered_by_two_models():
    def constant(value):
        layer = nn.Linear(4, 1)
        nn.init.zeros_(layer.weight)
        nn.init.constant_(layer.bias, value)
        return layer

    stop, seen, mixed = threading.Event(), set(), []

    def ask(predictor):
        while not stop.is_set():
            values = set(predictor(X[:8]).ravel().tolist())
            seen.update(values)
            mixed.extend(values if len(values) > 1 else [])

    with here(constant(0)) as predictor, ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, predictor) for _ in range(4)]
        after = []
        for value in range(1, 6):
            predictor.swap(constant(value))
            after.append(predictor(X[:1]).item())
        stop.set()
        for one in asking:
            one.result(WITHIN_S)

    assert mixed == []
    assert after == [1, 2, 3, 4, 5]
    assert seen <= {0, 1, 2, 3, 4, 5}


# ---- too much, too late


def until_room(predictor, rows):
    predictor._queue.room(rows).result(WITHIN_S)


def filled(predictor, queue_limit=4):
    """Calls of 4 rows: two batches are with the replica, and the last one waits."""
    calls = []
    for _ in range(3):
        until_room(predictor, queue_limit)  # the one before is with the replica
        calls.append(predictor.submit(X[:4]))
    return calls


def test_beyond_the_limit_calls_are_refused_at_once_and_later_ones_are_not(gate):
    with here(Gated(), replicas=1, batch_limit=4, queue_limit=4) as predictor:
        calls = filled(predictor)
        with pytest.raises(
            BusyError, match=r"1 calls wait with 4 rows, 1 more .* again"
        ):
            predictor.submit(X[:1])
        gate.set()

        np.testing.assert_allclose(calls[2].result(WITHIN_S), X[:4] * 2)
        predictor(X[:4])


def test_with_a_time_out_calls_wait_for_room(gate):
    with here(Gated(), replicas=1, batch_limit=4, queue_limit=4) as predictor:
        filled(predictor)
        with pytest.raises(BusyError, match="queue_limit=4"):
            predictor(X[:4], timeout_s=0.01)
        with ThreadPoolExecutor(1) as threads:
            late = threads.submit(predictor, X[:4], WITHIN_S)
            gate.set()

            np.testing.assert_allclose(late.result(WITHIN_S), X[:4] * 2)


def test_with_a_time_out_event_loops_wait_for_room(gate):
    async def ask(predictor):
        with pytest.raises(BusyError, match="queue_limit=4"):
            await predictor.acall(X[:4], timeout_s=0.01)
        late = asyncio.create_task(predictor.acall(X[:4], WITHIN_S))
        await asyncio.sleep(0)
        gate.set()
        return await late

    with here(Gated(), replicas=1, batch_limit=4, queue_limit=4) as predictor:
        filled(predictor)

        np.testing.assert_allclose(asyncio.run(ask(predictor)), X[:4] * 2)


def test_an_answer_that_comes_too_late_is_not_waited_for(gate):
    async def ask(predictor):
        await predictor.acall(X[:1], timeout_s=0.01)

    with here(Gated(), replicas=1) as predictor:
        with pytest.raises(WaitTimeoutError, match=r"within timeout_s=0\.01; is the"):
            predictor(X[:1], timeout_s=0.01)
        with pytest.raises(WaitTimeoutError, match=r"within timeout_s=0\.01; is the"):
            asyncio.run(ask(predictor))
        gate.set()
        predictor(X[:1])


def test_a_call_that_is_not_waited_for_any_more_makes_room(gate):
    with here(Gated(), replicas=1, batch_limit=4, queue_limit=8) as predictor:
        filled(predictor, 8)

        with pytest.raises(WaitTimeoutError, match="no answer within"):
            predictor(X[:4], timeout_s=0.01)

        until_room(predictor, 4)
        gate.set()


def test_a_call_that_is_cancelled_makes_room(gate):
    with here(Gated(), replicas=1, batch_limit=4, queue_limit=4) as predictor:
        *_, waiting = filled(predictor)

        assert waiting.cancel()
        until_room(predictor, 4)

        again = predictor.submit(X[:4])
        gate.set()
        np.testing.assert_allclose(again.result(WITHIN_S), X[:4] * 2)


def test_an_event_loop_that_does_not_wait_any_more_makes_room(gate):
    async def ask(predictor):
        task = asyncio.create_task(predictor.acall(X[:1], timeout_s=WITHIN_S))
        await asyncio.sleep(0)  # it asks
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with here(Gated(), replicas=1, batch_limit=4, queue_limit=8) as predictor:
        filled(predictor, 8)

        asyncio.run(ask(predictor))

        until_room(predictor, 4)
        gate.set()


def test_a_late_answer_for_an_event_loop_that_is_closed_is_nobodys(gate, caplog):
    with here(Gated(), replicas=1) as predictor:
        with pytest.raises(WaitTimeoutError):
            asyncio.run(predictor.acall(X[:1], timeout_s=0.01))
        gate.set()
        predictor(X[:1])

    assert not caplog.records


@pytest.mark.parametrize(
    "wait",
    [
        lambda predictor: predictor(X[:1]),
        lambda predictor: predictor.swap(nn.Identity()),
        lambda predictor: predictor.close(),
    ],
    ids=["call", "swap", "close"],
)
def test_the_thread_that_answers_may_not_wait_for_answers(gate, wait):
    told = Future()

    def after(answer):
        try:
            told.set_result(wait(predictor))
        except RunError as error:
            told.set_exception(error)

    with here(Gated()) as predictor:
        predictor.submit(X[:1]).add_done_callback(after)
        gate.set()

        with pytest.raises(RunError, match="must not wait for them; use submit"):
            told.result(WITHIN_S)
        assert len(predictor(X[:1])) == 1


# ---- what comes in


def test_a_call_may_be_changed_as_soon_as_it_was_made(gate):
    x = X[:2].copy()

    with here(Gated()) as predictor:
        answer = predictor.submit(x)
        x[:] = 0
        gate.set()

        np.testing.assert_array_equal(answer.result(WITHIN_S), X[:2] * 2)


class Pair(NamedTuple):
    left: object
    right: object


class Rows(nn.Module):
    """How many rows are in a batch."""

    def forward(self, x):
        leaf = x["a"] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x
        return torch.full((len(leaf),), len(leaf))


@pytest.mark.parametrize(
    ("one", "other", "joined"),
    [
        (X[:2], torch.from_numpy(X[:2]), True),
        ({"a": X[:2], "b": X[:2]}, {"a": X[:2], "b": X[:2]}, True),
        (X[:2], X[:2, :1], False),
        (X[:2], X[:2].astype(np.float64), False),
        (X[:2], (X[:2],), False),
        ({"a": X[:2], "b": X[:2]}, {"a": X[:2], "c": X[:2]}, False),
        ((X[:2], X[:2]), Pair(X[:2], X[:2]), False),
    ],
    ids=["tensor", "dict", "shape", "dtype", "tuple", "names", "named tuple"],
)
def test_calls_of_one_structure_shape_and_dtype_share_a_batch(one, other, joined):
    with here(Rows(), replicas=1, batch_limit=4, wait_ms=20) as predictor:
        answers = [predictor.submit(x).result for x in (one, other)]

        rows = [int(answer(WITHIN_S)[0]) for answer in answers]

    assert rows == ([4, 4] if joined else [2, 2])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X.tolist(), "X must be a numpy array, a torch tensor .* got a list"),
        ({}, "X must not be empty, got no array"),
        (X[:0], r"X must not be empty, got the shape \(0, 4\)"),
        (np.float32(1), "X must be a numpy array"),
        (torch.tensor(1.0), "X must have examples along its first axis"),
        (X.astype("U1"), "X must hold real numbers"),
        (
            {"a": X, "b": X[:2]},
            r"equally many rows .* {\"X\['a'\]\": 64, \"X\['b'\]\": 2",
        ),
        (da.from_array(X), "X must be in memory, got a dask.array; use predict"),
        (X, "X has 64 rows, of which .* batch_limit=32; cut it"),
    ],
    ids=["list", "no", "empty", "number", "scalar", "text", "rows", "lazy", "long"],
)
def test_rows_that_cannot_be_used_are_refused(x, message):
    with here(nn.Identity()) as predictor, pytest.raises(DataError, match=message):
        predictor.submit(x)


class Threads(nn.Module):
    """How many torch has where it computes."""

    def forward(self, x):
        return torch.full((len(x),), torch.get_num_threads())


def test_replicas_share_the_threads_of_torch():
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        with here(Threads(), replicas=2) as predictor:
            assert predictor(X[:1]).tolist() == [3]
    finally:
        torch.set_num_threads(before)


# ---- what fails


def test_rows_that_the_model_fails_on_fail_alone(model):
    with here(model, replicas=1) as predictor:
        with pytest.raises(
            ModelError, match=r"failed on 2 rows, X: shape \(2, 3\)"
        ) as error:
            predictor(X[:2, :3])
        assert "Traceback (most recent call last)" in error.value.__notes__[0]

        predictor(X[:2])


class Parameterless(nn.Module):
    def forward(self, x):
        return x.to(next(self.parameters()).device)


def test_a_model_that_stops_an_iteration_fails_as_others_do():
    with (
        here(Parameterless()) as predictor,
        pytest.raises(ModelError, match="StopIteration"),
    ):
        predictor(X[:1], timeout_s=WITHIN_S)


def test_outputs_that_have_no_row_for_each_example_are_refused():
    with (
        here(nn.Flatten(0)) as predictor,
        pytest.raises(ModelError, match=r"one row per example, .* \(8,\) for 2 rows"),
    ):
        predictor(X[:2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "replicas must be a whole number >= 1, got 0"),
        ({"replicas": True}, "replicas must be a whole number >= 1, got True"),
        ({"batch_limit": 1.5}, "batch_limit must be a whole number >= 1, got 1.5"),
        ({"wait_ms": float("nan")}, "wait_ms must be >= 0 and finite, got nan"),
        ({"wait_ms": "2"}, "wait_ms must be >= 0 and finite, got '2'"),
        ({"queue_limit": 31}, "queue_limit must be a whole number >= 32, got 31"),
    ],
    ids=str,
)
def test_options_that_are_not_allowed_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        here(nn.Identity(), **options)


def test_a_model_that_cannot_be_pickled_is_refused():
    layer = nn.Linear(4, 1)
    layer.lock = threading.Lock()

    with pytest.raises(ModelError, match=r"model\.lock .* cannot be pickled"):
        here(layer)


# ---- the end


def own_threads():
    return {t.name for t in threading.enumerate() if t.name.startswith("daskdl-")}


def test_after_closing_nothing_is_left_and_nothing_is_answered(model):
    predictor = here(model)
    predictor(X[:1])
    assert own_threads()

    predictor.close()
    predictor.close()

    for ask in (predictor, predictor.submit):
        with pytest.raises(RunError, match="the predictor is closed"):
            ask(X[:1])
    with pytest.raises(RunError, match="the predictor is closed"):
        predictor.swap(model)
    for thread in threading.enumerate():
        if thread.name.startswith("daskdl-predictor"):
            thread.join(WITHIN_S)
    assert own_threads() == set()


def test_closing_waits_for_answers(gate):
    with here(Gated(), replicas=1) as predictor:
        answer = predictor.submit(X[:1])
        threading.Timer(0.01, gate.set).start()

    np.testing.assert_allclose(answer.result(0), X[:1] * 2)


@pytest.mark.timeout(30)
def test_an_exception_closes_without_waiting(gate):
    with dask.config.set({"daskdl.timeouts.stop": 1000}):
        predictor = here(Gated(), replicas=1)
    answer = predictor.submit(X[:1])

    predictor.__exit__(ZeroDivisionError, ZeroDivisionError(), None)

    with pytest.raises(RunError, match="closed before this call was answered"):
        answer.result(0)
    assert isinstance(answer, Future)


def test_closing_waits_for_so_long_only(gate):
    with (
        dask.config.set({"daskdl.timeouts.stop": 0.05}),
        here(Gated(), replicas=1) as predictor,
    ):
        answer = predictor.submit(X[:1])

    with pytest.raises(RunError, match="closed before this call was answered"):
        answer.result(0)


def test_the_page_lists_the_options_with_their_defaults():
    page = Path(__file__).parents[2] / "docs" / "inference.md"
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", page.read_text(), re.M))

    parameters = inspect.signature(Predictor).parameters.values()
    options = {p.name: repr(p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}
    of_trainer = inspect.signature(Trainer.predictor).parameters.values()

    assert rows == {k: v for k, v in options.items() if k != "client"}
    assert rows == {
        p.name: repr(p.default) for p in of_trainer if p.kind is p.KEYWORD_ONLY
    }
