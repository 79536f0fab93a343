"""Processes that do the same as this one, so that what they share is shared."""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

from daskdl.errors import RunError, WaitTimeoutError
from daskdl.packed import Packed
from daskdl.planning.scene import Script
from daskdl.timeouts import Timeouts

READY = b"ready\n"
SHOWN = 2000  # characters of what a process said before it failed


@contextlib.contextmanager
def company(script: Packed[Script], processes: int) -> Iterator[None]:
    """Let so many more processes rehearse meanwhile, without an end.

    They end when their standard input does: with this process at the latest.

    Args:
        script: What to rehearse.
        processes: How many; 0 is nobody.

    Raises:
        RunError: If one of them failed.
        WaitTimeoutError: If one of them was not ready in time.
    """
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(_process(script)) for _ in range(processes)]
        for process, said in started:
            _wait_until_ready(process, said)
        yield
        for process, said in started:
            if process.poll() is not None:
                raise RunError(f"a process beside this one ended: {_last(said)}")


@contextlib.contextmanager
def _process(
    script: Packed[Script],
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    bound = Timeouts.from_config().bound("stop")
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
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # what it said is shown later
                process.stdin.write(script.payload.nbytes.to_bytes(8, "little"))
                process.stdin.write(script.payload.data)
                process.stdin.flush()
            yield process, said
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(bound.seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _wait_until_ready(process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    bound = Timeouts.from_config().bound("join")
    heard: list[bytes] = []

    def listen() -> None:
        assert process.stdout is not None
        heard.append(process.stdout.readline())

    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    listening.join(bound.seconds)
    if not heard:
        raise WaitTimeoutError(
            f"a process beside this one was not ready within {bound}: {_last(said)}"
        )
    if heard[0] != READY:
        raise RunError(f"a process beside this one failed: {_last(said)}")


def _last(said: IO[bytes]) -> str:
    said.seek(0)
    text = said.read().decode(errors="replace").strip()
    return text[-SHOWN:] or "it said nothing"
