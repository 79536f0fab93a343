"""Keras models as files of Keras."""

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any

from daskdl.errors import OptionError

ENDING = ".keras"


def save(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a Keras model; a file that is there is replaced when all is written.

    Args:
        model: Of Keras.
        path: Of a local file, ending in ``.keras``.

    Raises:
        OptionError: If it ends otherwise.
        OSError: If it cannot be written.
    """
    target = Path(path)
    if target.suffix != ENDING:
        raise OptionError(f"path must end in {ENDING!r}, got {str(path)!r}")
    partial = target.with_name(f".{target.stem}-{secrets.token_hex(4)}{ENDING}")
    try:
        model.save(partial)
        partial.replace(target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
