"""What a replica tells of an exception that ends it."""

import traceback
from typing import Any

import cloudpickle

from daskdl.errors import DaskDLError


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
    except Exception:  # user code: how it is pickled may be its own
        pickled = b""  # its traceback, as text, says enough
    return {
        "type": type(error).__name__ if own else "ReplicaError",
        "summary": str(error) if own else summary,
        "traceback": "".join(traceback.format_exception(error)),
        "step": step,
        "pickled": pickled,
    }
