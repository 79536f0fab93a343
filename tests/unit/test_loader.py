"""Threads that load data beside training."""

import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError, wait
from contextvars import ContextVar

import pytest

from daskdl.training.data_feed import Loader

WHO = ContextVar("who", default="nobody")
PATIENCE_S = 30  # of a test that would fail otherwise


@pytest.fixture
def loader():
    own = Loader(1, "test-loader")
    yield own
    own.close()


def threads():
    return [t for t in threading.enumerate() if t.name == "test-loader"]


def join():
    for thread in threads():
        thread.join(PATIENCE_S)


def test_a_job_finds_the_context_of_who_asked_for_it(loader):
    token = WHO.set("a task")
    try:
        future = loader.submit(WHO.get)
    finally:
        WHO.reset(token)

    assert future.result(PATIENCE_S) == "a task"
    assert loader.submit(WHO.get).result(PATIENCE_S) == "nobody"


def test_jobs_run_in_their_order_in_one_thread_of_another_name(loader):
    seen = []

    futures = [
        loader.submit(
            lambda i=i: seen.append((i, threading.current_thread().name)) or i
        )
        for i in range(20)
    ]

    assert [future.result(PATIENCE_S) for future in futures] == list(range(20))
    assert seen == [(i, "test-loader") for i in range(20)]


def test_as_many_jobs_run_together_as_there_are_threads():
    own, meeting = Loader(3, "test-loader"), threading.Barrier(3)

    futures = [own.submit(lambda: meeting.wait(PATIENCE_S)) for _ in range(3)]

    assert sorted(future.result(PATIENCE_S) for future in futures) == [0, 1, 2]
    own.close()
    join()


def test_threads_are_started_when_they_are_needed_and_no_more_of_them():
    own, held = Loader(2, "test-loader"), threading.Event()
    counts = [len(threads())]

    for _ in range(4):
        own.submit(lambda: held.wait(PATIENCE_S))
        counts.append(len(threads()))
    held.set()
    own.close()
    join()

    assert counts == [0, 1, 2, 2, 2]


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()])
def test_what_a_job_raises_is_the_futures_and_the_next_one_runs(loader, error):
    def fail():
        raise error

    failed, after = loader.submit(fail), loader.submit(lambda: 5)

    assert after.result(PATIENCE_S) == 5
    assert failed.exception(PATIENCE_S) is error


def test_a_job_that_was_cancelled_before_it_began_does_not_run(loader):
    held, ran = threading.Event(), []
    first = loader.submit(lambda: held.wait(PATIENCE_S))
    second, third = (loader.submit(lambda i=i: ran.append(i)) for i in (2, 3))

    second.cancel()
    held.set()
    wait([first, third], PATIENCE_S)

    assert ran == [3]


def test_after_close_the_job_that_runs_ends_and_no_other_begins(loader):
    begun, held, ran = threading.Event(), threading.Event(), []

    def job():
        begun.set()
        return held.wait(PATIENCE_S)

    first, second = loader.submit(job), loader.submit(lambda: ran.append(2))
    assert begun.wait(PATIENCE_S)
    loader.close()
    held.set()
    join()

    assert first.result(PATIENCE_S)
    with pytest.raises(CancelledError):
        second.result(PATIENCE_S)
    assert (ran, threads()) == ([], [])


def test_a_part_that_was_fetched_is_not_kept(loader):
    class Rows:
        pass

    gone = threading.Event()
    future = loader.submit(Rows)
    weakref.finalize(future.result(PATIENCE_S), gone.set)
    del future

    assert gone.wait(PATIENCE_S)


def test_a_job_that_hangs_does_not_keep_a_process_from_ending():
    code = (
        "import threading; from daskdl.training.data_feed import Loader; "
        "begun = threading.Event(); "
        "Loader(1, 'x').submit(lambda: (begun.set(), threading.Event().wait())); "
        "begun.wait(); print('over')"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50
    )

    assert (done.stdout, done.returncode) == ("over\n", 0)
