import asyncio
from concurrent.futures import Future

import pytest

from daskdl.errors import RunError
from daskdl.inference import pool
from daskdl.inference.pool import settled


def test_nobody_waits_for_an_event_loop_that_has_stopped(monkeypatch):
    monkeypatch.setattr(pool, "LOOK_S", 0.001)
    loop = asyncio.new_event_loop()

    with pytest.raises(RunError, match="the predictor's client is closed"):
        settled(Future(), loop)

    loop.close()


def test_what_is_done_is_taken_whoever_has_stopped():
    loop, future = asyncio.new_event_loop(), Future()
    future.set_result(1)

    settled(future, loop)

    loop.close()
