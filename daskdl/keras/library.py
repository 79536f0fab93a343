"""The library Keras, imported when it is first needed, on its PyTorch backend.

Keras settles its backend once for each process, when it is imported. Workers unpickle
models, so they come through here too, each with an environment of its own.
"""

import contextlib
import functools
import os
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from daskdl.errors import OptionError

BACKEND = "torch"
VARIABLE = "KERAS_BACKEND"

# Building a model goes through state of the whole process: Python's generator is one.
_building = threading.RLock()


@functools.cache
def library() -> Any:
    """Return the module `keras`.

    Raises:
        OptionError: If it is not installed, older than 3, or has another backend
            than PyTorch in this process.
    """
    with _on_torch():
        try:
            import keras
        except ImportError as error:
            raise OptionError(
                f"Keras models need the library Keras 3, which cannot be imported "
                f"here: {error}; install it with pip install daskdl[keras], also on "
                "the workers"
            ) from error
    if int(keras.__version__.split(".")[0]) < 3:
        raise OptionError(
            f"Keras models need Keras 3, got {keras.__version__}; install it with "
            "pip install daskdl[keras], also on the workers"
        )
    backend = keras.backend.backend()
    if backend != BACKEND:
        raise OptionError(
            f"Keras models are trained on Keras' backend {BACKEND!r}, and keras has "
            f"been imported with {backend!r} in this process; set "
            f"{VARIABLE}={BACKEND} before it is imported, also on the workers"
        )
    return keras


@contextlib.contextmanager
def _on_torch() -> Iterator[None]:
    """Have Keras choose PyTorch; an environment that says something else is wrong."""
    chosen = os.environ.get(VARIABLE)
    if chosen or "keras" in sys.modules:
        if "keras" not in sys.modules and chosen != BACKEND:
            raise OptionError(
                f"Keras models are trained on Keras' backend {BACKEND!r}, and "
                f"{VARIABLE} is {chosen!r} in this process; set it to {BACKEND}, or "
                "unset it, also on the workers"
            )
        yield
        return
    os.environ[VARIABLE] = BACKEND  # else a file in the user's home decides
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


@contextlib.contextmanager
def building(*, seeded: bool) -> Iterator[Any]:
    """Build a model meanwhile: on the CPU, and Python's generator is left as it was.

    Initialisers without a seed draw one from Python's generator.

    Args:
        seeded: Let torch's generator decide what they draw.

    Yields:
        The library.
    """
    keras = library()
    with _building:
        former = random.getstate()
        if seeded:
            random.seed(int(torch.randint(2**31, ())))
        try:
            with keras.device("cpu"):
                yield keras
        finally:
            random.setstate(former)
