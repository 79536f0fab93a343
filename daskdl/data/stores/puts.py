"""How a file comes into being at once, on each kind of file system."""

import os
import uuid
from pathlib import Path
from typing import Any

# Ends the name of a file that is being written; such files are in no listing.
TEMPORARY = ".daskdl-part"
LOCAL = frozenset({"file", "local"})
# Here one request puts a whole file, and folders need not be made.
_PUT_WHOLE = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "memory"}
)


def put(system: Any, path: str, content: bytes | memoryview) -> None:
    """Write a file; who reads meanwhile sees all of it or what was there before.

    Locally a temporary file beside it is renamed, an object store gets one put;
    elsewhere a temporary file is moved, by whatever the file system has for it.

    Args:
        system: A fsspec file system.
        path: On it; missing folders are made.
        content: All of the file.

    Raises:
        OSError: What the file system raises, and whatever else it does.
    """
    kinds = _protocols(system)
    if kinds & LOCAL:
        _rename(Path(path), content)
    elif kinds & _PUT_WHOLE:
        system.pipe_file(path, bytes(content))
    else:
        _move(system, path, bytes(content))


def _protocols(system: Any) -> set[str]:
    kinds = system.protocol
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _rename(final: Path, content: bytes | memoryview) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{uuid.uuid4().hex}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a crash could leave the name without bytes
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)


def _move(system: Any, path: str, content: bytes) -> None:
    folder = path.rpartition("/")[0]
    temporary = f"{folder}/.{uuid.uuid4().hex}{TEMPORARY}"
    system.makedirs(folder, exist_ok=True)
    system.pipe_file(temporary, content)
    system.mv(temporary, path)
