"""What a replica tells of an exception that ends it."""

import traceback
from typing import Any

import cloudpickle

from daskdl import errors
from daskdl.guard import guarded


def failure_of(error: Exception, step: int) -> dict[str, Any]:
    """Say what happened, in plain values.

    Args:
        error: Of daskdl or of the user's code.
        step: Steps that the replica has made.
    """
    summary = f"{type(error).__name__}: {error}"
    own = type(error).__module__ == errors.__name__
    return {
        "type": type(error).__name__ if own else "ReplicaError",
        "summary": str(error) if own else summary,
        "traceback": "".join(traceback.format_exception(error)),
        "step": step,
        # How it is pickled may be the user's code; its traceback, as text, says enough.
        "pickled": guarded(lambda: cloudpickle.dumps(error), lambda _: b""),
    }
