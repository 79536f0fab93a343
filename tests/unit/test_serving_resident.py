import asyncio
import gc
import threading
import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.inference.batching import Failure
from daskdl.inference.pool import Resident
from daskdl.serialization import Packed, PackedModel
from tests.contract.test_serving_dispatcher import on_a_loop

X = np.array([[-1.0, 2.0]], np.float32)


class Held(nn.Module):
    """Is not unpacked before it may be."""

    may = threading.Event()
    made: ClassVar[list[weakref.ref]] = []

    def __setstate__(self, state):
        assert Held.may.wait(30)
        super().__setstate__(state)
        Held.made.append(weakref.ref(self))


class Threads(nn.Module):
    """How many torch has where it computes."""

    def forward(self, x):
        return torch.full((len(x),), torch.get_num_threads())


async def resident(model, transform=None, threads=1):
    own = Resident(transform, threads)
    assert await own.stage(1, PackedModel(model)) is None
    own.use(1)
    return own


@on_a_loop
async def test_it_answers_and_leaves_the_rows_alone():
    own = await resident(nn.ReLU(inplace=True))
    x = X.copy()

    outputs = await own.outputs(x)

    np.testing.assert_array_equal(outputs.tree, [[0.0, 2.0]])
    np.testing.assert_array_equal(x, X)
    own.close()


@on_a_loop
async def test_a_transform_comes_first_and_its_labels_are_none():
    def transform(batch):
        assert batch[1] is None
        return batch[0] + 1, None

    own = await resident(nn.Identity(), Packed(transform, "transform"))

    np.testing.assert_array_equal((await own.outputs(X)).tree, X + 1)
    own.close()


@on_a_loop
async def test_what_is_raised_is_told_and_the_next_is_answered():
    own = await resident(nn.Linear(2, 1))

    failure = await own.outputs(np.zeros((1, 3), np.float32))

    assert isinstance(failure, Failure)
    assert failure.summary.startswith("RuntimeError: mat1 and mat2")
    assert "Traceback (most recent call last)" in failure.details
    assert not isinstance(await own.outputs(X), Failure)
    own.close()


@on_a_loop
async def test_what_cannot_be_unpacked_is_told_and_the_former_model_stays():
    own = await resident(nn.Identity())
    payload = PackedModel(nn.Identity()).payload
    damaged = PackedModel.of(payload[: payload.size // 2], "model")

    failure = await own.stage(2, damaged)

    assert isinstance(failure, Failure)
    np.testing.assert_array_equal((await own.outputs(X)).tree, X)
    own.close()


@on_a_loop
async def test_one_that_is_closed_while_it_gets_a_model_has_none_when_it_is_gone():
    own = await resident(nn.Identity())
    staging = asyncio.create_task(own.stage(2, PackedModel(Held())))
    await asyncio.sleep(0)  # it is asked now

    own.close()
    going = asyncio.create_task(own.gone())
    await asyncio.sleep(0)
    assert not going.done()
    Held.may.set()
    await going
    gc.collect()

    (made,) = Held.made
    assert made() is None
    assert await staging is None


@pytest.mark.parametrize("verb", ["use", "discard", "close"])
def test_models_that_are_not_used_any_more_leave_memory(verb):
    async def check():
        own = await resident(nn.Linear(2, 1))
        await own.outputs(X)
        await own.stage(2, PackedModel(nn.Linear(2, 1)))
        former, staged = weakref.ref(own._model), weakref.ref(own._staged[2])
        if verb == "use":
            own.use(2)
        elif verb == "discard":
            own.discard()
        own.close()
        await own.gone()
        return former, staged

    former, staged = asyncio.run(check())
    gc.collect()

    assert former() is None
    assert staged() is None


@on_a_loop
async def test_only_the_model_in_use_stays():
    own = await resident(nn.Linear(2, 1))
    former = weakref.ref(own._model)
    await own.stage(2, PackedModel(nn.Linear(2, 1)))

    own.use(2)
    gc.collect()

    assert former() is None
    assert own._staged == {}
    own.close()


@on_a_loop
async def test_torch_has_the_threads_it_was_given_until_it_is_closed():
    before = torch.get_num_threads()
    own = await resident(Threads(), threads=before + 1)

    outputs = await own.outputs(X)
    own.close()
    await own.gone()

    assert outputs.tree.tolist() == [before + 1]
    assert await asyncio.to_thread(torch.get_num_threads) == before


@on_a_loop
async def test_one_that_is_closed_cannot_be_reached():
    own = await resident(nn.Identity())

    own.close()
    own.close()

    with pytest.raises(ConnectionError, match="the replica is closed"):
        await own.outputs(X)
