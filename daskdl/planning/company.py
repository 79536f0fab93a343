"""Processes that rehearse at the same time, so that what they share is shared."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import IO, TypeVar

import numpy as np
from numpy.typing import NDArray

from daskdl.config import Bound, Timeouts
from daskdl.errors import RunError, WaitTimeoutError
from daskdl.planning.costs import Costs
from daskdl.planning.scene import Script
from daskdl.serialization import Packed

T = TypeVar("T")

READY = b"ready\n"
GO = b"!"
SHOWN = 2000  # characters of what a process said before it failed


def rehearse_together(
    script: Packed[Script], processes: int, patience_s: float
) -> list[Costs]:
    """Rehearse in so many processes at once; each one's costs.

    They end when their standard input does: with this process at the latest.

    Args:
        script: What to rehearse.
        processes: How many.
        patience_s: How long a rehearsal may take, seconds, not counting what a process
            needs to start, for which there is the time-out `join`.

    Raises:
        RunError: If one of them failed.
        WaitTimeoutError: If one of them took too long.
    """
    bound = Timeouts.from_config().bound("join")
    bound = bound._replace(seconds=bound.seconds + patience_s)
    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(_member(bound)) for _ in range(processes)]
        for member in members:
            member.send(script.payload)
        for member in members:
            if member.line() != READY:
                raise member.failed()
        for member in members:
            member.go()
        return [Costs(**json.loads(member.line())) for member in members]


class _Member:
    """One of the processes, and how long to wait for it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        said: IO[bytes],
        bound: Bound,
        stop: Bound,
    ) -> None:
        self._process, self._said = process, said
        self._bound, self._stop = bound, stop

    def send(self, payload: NDArray[np.uint8]) -> None:
        """Tell it what to rehearse."""
        self._write(payload.nbytes.to_bytes(8, "little"), payload.data)

    def go(self) -> None:
        """Tell it to measure."""
        self._write(GO)

    def line(self) -> bytes:
        """What it says next."""
        stream = self._process.stdout
        assert stream is not None
        line = self._waited(stream.readline)
        if not line:
            raise self.failed()
        return line

    def failed(self) -> RunError:
        """Why it says no more; it is given the time to end by itself."""
        return RunError(f"a process that rehearses {self._end()}: {self._last()}")

    def _write(self, *parts: bytes | memoryview) -> None:
        stream = self._process.stdin
        assert stream is not None
        # One that has ended says why when it is listened to.
        with contextlib.suppress(BrokenPipeError):
            self._waited(lambda: (stream.writelines(parts), stream.flush()))

    def _waited(self, talk: Callable[[], T]) -> T:
        """Talk to it, with a bound: it may hang."""
        talking: Future[T] = Future()

        def run() -> None:
            try:
                talking.set_result(talk())
            except OSError as error:
                talking.set_exception(error)

        threading.Thread(target=run, name="daskdl-plan", daemon=True).start()
        try:
            return talking.result(self._bound.seconds)
        except TimeoutError as error:
            raise WaitTimeoutError(
                "a process that rehearses has not answered within "
                f"{self._bound}: {self._last()}"
            ) from error

    def _end(self) -> str:
        try:
            status = self._process.wait(self._stop.seconds)
        except subprocess.TimeoutExpired:
            return f"says no more, and did not end within {self._stop}"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def _last(self) -> str:
        self._said.seek(0)
        text = self._said.read().decode(errors="replace").strip()
        return text[-SHOWN:] or "it said nothing"


@contextlib.contextmanager
def _member(bound: Bound) -> Iterator[_Member]:
    stop = Timeouts.from_config().bound("stop")
    # It finds modules where this process does.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "daskdl.planning.companion"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=environment,
        )
        try:
            yield _Member(process, said, bound, stop)
        finally:
            process.kill()  # it has nothing to put away
            process.wait(stop.seconds)
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
