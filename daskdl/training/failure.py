"""What a replica tells of an exception that ends it."""

import pickle
import traceback
from typing import Any

import cloudpickle

from daskdl.errors import DaskDLError

# What pickling an exception of the user's raises, depending on what it holds.
UNPICKLABLE = (
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    pickle.PickleError,
)


def failure_of(error: Exception, step: int) -> dict[str, Any]:
    """Say what happened, in plain values.

    Args:
        error: Of daskdl or of the user's code.
        step: Steps that the replica has made.
    """
    summary = f"{type(error).__name__}: {error}"
    own = isinstance(error, DaskDLError)
    try:
        pickled = cloudpickle.dumps(error)
    except UNPICKLABLE:
        pickled = b""  # its traceback, as text, says enough
    return {
        "type": type(error).__name__ if own else "ReplicaError",
        "summary": str(error) if own else summary,
        "traceback": "".join(traceback.format_exception(error)),
        "step": step,
        "pickled": pickled,
    }
