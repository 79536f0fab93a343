import asyncio
import weakref
from types import SimpleNamespace

import numpy as np
from torch import nn

from daskdl.channel.protocol import unwrap, wrap
from daskdl.inference.batching import structure_of
from daskdl.inference.pool import open_end
from daskdl.serialization import PackedModel
from tests.contract.test_serving_dispatcher import on_a_loop

X = np.array([[-1.0, 2.0]], np.float32)
NAME = "daskdl-predictor-0-0"


class Handlers(dict):
    """Says when one has gone."""

    def __init__(self):
        self.gone = asyncio.Event()

    def pop(self, name, default=None):
        self.gone.set()
        return super().pop(name, default)


async def opened(silence_s=1000.0):
    """A worker with a replica."""
    state = SimpleNamespace(nthreads=1)
    worker = SimpleNamespace(handlers=Handlers(), extensions={}, state=state)
    await open_end(NAME, None, 1, silence_s, worker)
    return worker


async def asked(worker, call, **fields):
    return await worker.handlers[NAME](call=call, **fields)


async def staged(worker, model=nn.Identity()):  # noqa: B008  # it is not changed
    payload = wrap(PackedModel(model).payload)
    answer = await asked(worker, "stage", version=1, payload=payload)
    await asked(worker, "use", version=1)
    return answer


@on_a_loop
async def test_it_answers_by_the_model_it_was_sent():
    worker = await opened()
    await staged(worker)

    leaves = [wrap(X)]
    answer = await asked(worker, "ask", structure=structure_of(X), leaves=leaves)

    np.testing.assert_array_equal(unwrap(answer["leaves"][0]), X)
    assert answer["dtypes"] == ["float32"]
    await asked(worker, "close", wait=True)


@on_a_loop
async def test_what_the_model_raises_is_an_answer():
    worker = await opened()
    await staged(worker, nn.Linear(3, 1))

    leaves = [wrap(X)]
    answer = await asked(worker, "ask", structure=structure_of(X), leaves=leaves)

    assert answer["status"] == "failed"
    assert answer["summary"].startswith("RuntimeError: mat1")
    await asked(worker, "close", wait=True)


@on_a_loop
async def test_closing_leaves_nothing_on_the_worker():
    worker = await opened()
    await staged(worker)
    assert list(worker.handlers) == list(worker.extensions) == [NAME]
    model = weakref.ref(worker.extensions[NAME]._resident._model)

    await asked(worker, "close", wait=True)

    assert not worker.handlers
    assert not worker.extensions
    assert model() is None


@on_a_loop
async def test_a_client_that_is_silent_for_too_long_is_not_waited_for():
    worker = await opened(silence_s=0.001)

    await asyncio.wait_for(worker.handlers.gone.wait(), 10)

    assert not worker.handlers
    assert not worker.extensions


@on_a_loop
async def test_while_it_computes_nobody_has_to_say_a_word():
    worker = await opened()
    end = worker.extensions[NAME]
    end._silence_s = 0.0
    end._asked = 1

    end._look()
    assert worker.handlers
    end._asked = 0
    end._look()

    assert not worker.handlers


@on_a_loop
async def test_dask_may_close_it_with_the_worker_going_through_all_extensions():
    worker = await opened()

    for extension in worker.extensions.values():
        extension.close()

    assert worker.extensions[NAME]._resident.closed
