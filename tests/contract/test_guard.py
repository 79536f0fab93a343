import ast
import gc
import weakref
from concurrent.futures import Future
from pathlib import Path

import daskdl
from daskdl.util import guarded, settle


class OwnError(Exception):
    """An exception of the user's code."""


def failing(error):
    def fail():
        raise error

    return fail


def test_results_and_exceptions_are_returned():
    future = Future()

    settle(future, lambda: 7)

    assert guarded(lambda: 7, repr) == future.result(0) == 7
    assert guarded(failing(OwnError("x")), repr) == "OwnError('x')"


class Held:
    """A stand-in for a model."""


def failing_with(thing):
    def fail():
        kept = thing
        raise OwnError(repr(kept))

    return fail


def test_a_dropped_error_is_freed_without_a_collection():
    thing = Held()
    gone = weakref.ref(thing)

    gc.disable()
    try:
        futures = [Future()]
        settle(futures[0], failing_with(thing))
        del thing
        assert gone() is not None  # in the traceback
        del futures
        assert gone() is None
    finally:
        gc.enable()


def caught_in(path):
    """Yield the lines that catch all exceptions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type or ast.Name("BaseException")
            names = {n.id for n in ast.walk(caught) if isinstance(n, ast.Name)}
            if names & {"BaseException", "Exception"}:
                yield f"{path.name}:{node.lineno}"


# Parsed before any test runs: a traceback that another thread formats meanwhile breaks
# the parser of Python 3.11.
CAUGHT = [
    line
    for path in Path(daskdl.__file__).parent.rglob("*.py")
    for line in caught_in(path)
]


def test_nothing_else_catches_all_exceptions():
    files = sorted(line.split(":")[0] for line in CAUGHT)
    # broadcast.py, errors.py and storage.py raise the exceptions again.
    raising = ["broadcast.py", "errors.py", "storage.py"]
    assert files == [*raising, "transport.py", "util.py", "util.py"]
