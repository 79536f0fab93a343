"""The index of a save: JSON that names each of its files, and has a checksum.

No I/O. What a file is called follows from what is in it, so a name in an index that was
tampered with leads nowhere else, and a new file never takes the place of an old one.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from daskdl.errors import SaveError

MOST_BYTES = 256 * 2**20  # of the JSON; 10,000 epochs of history take 10 MB
DIGITS = 16  # of the checksum in a file's name
SUFFIX = ".safetensors"
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Kind:
    """What is saved, and how it is laid out.

    Attributes:
        form: What the index says it is.
        version: Of the layout; raised by whoever changes it.
        index: File name of the index.
        roles: What files there may be.
    """

    form: str
    version: int
    index: str
    roles: tuple[str, ...]


class File(NamedTuple):
    """A file beside the index."""

    name: str
    nbytes: int
    sha256: str  # in hexadecimal


def file_of(role: str, content: bytes | memoryview) -> File:
    """Name a file after what is in it.

    Example:
        >>> file_of("model", b"").name
        'model-e3b0c44298fc1c14.safetensors'
    """
    digest = hashlib.sha256(content).hexdigest()
    return File(_name(role, digest), len(content), digest)


def encode_index(
    kind: Kind, made_by: Mapping[str, str], files: Mapping[str, File], content: Any
) -> bytes:
    """Write an index.

    Args:
        kind: Of what is saved.
        made_by: Versions of the libraries, for people.
        files: By role.
        content: JSON.
    """
    index: dict[str, Any] = {
        "format": kind.form,
        "version": kind.version,
        "made_by": dict(made_by),
        "files": {role: file._asdict() for role, file in files.items()},
        "content": content,
    }
    index["sha256"] = _digest(index)
    return json.dumps(index, indent=1, allow_nan=False).encode()


def decode_index(kind: Kind, encoded: bytes) -> tuple[dict[str, File], Any]:
    """Read an index.

    Args:
        kind: Of what it has to be.
        encoded: The file, whatever it is.

    Returns:
        The files by role, and the content.

    Raises:
        SaveError: If it is damaged, of something else, or too new.
    """
    index = _parsed(encoded)
    if not isinstance(index, dict) or index.get("format") != kind.form:
        raise SaveError(f"it is not of the format {kind.form!r}")
    version = index.get("version")
    if type(version) is not int or version < 1:
        raise SaveError(f"its version is {version!r:.80}, not a number from 1 on")
    if version > kind.version:
        raise SaveError(
            f"it is of version {version}, and this daskdl reads up to {kind.version}; "
            "install a newer one"
        )
    if index.pop("sha256", None) != _digest(index):
        raise SaveError("it is damaged: its checksum is wrong")
    return _files(kind, index.get("files")), index.get("content")


def _parsed(encoded: bytes) -> Any:
    try:
        return json.loads(encoded, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # also of bytes that are no text
        raise SaveError(f"it is no JSON: {error!s:.200}") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _digest(index: Mapping[str, Any]) -> str:
    try:
        return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    except RecursionError as error:
        raise SaveError("it is nested too deeply") from error


def _files(kind: Kind, listed: Any) -> dict[str, File]:
    if not isinstance(listed, dict):
        raise SaveError(f"its files are {listed!r:.80}")
    files = {}
    for role, entry in listed.items():
        if role not in kind.roles:
            raise SaveError(f"it names a file for {role!r:.80}, which is unknown")
        files[role] = _file(role, entry)
    return files


def _file(role: str, entry: Any) -> File:
    try:
        file = File(**entry)
    except TypeError as error:
        raise SaveError(f"it describes the file of {role} as {entry!r:.200}") from error
    whole = isinstance(file.sha256, str) and _DIGEST.fullmatch(file.sha256)
    if not whole or file.name != _name(role, file.sha256):
        raise SaveError(f"it describes the file of {role} as {entry!r:.200}")
    if type(file.nbytes) is not int:
        raise SaveError(f"it gives the file of {role} {file.nbytes!r:.80} bytes")
    return file


def _name(role: str, sha256: str) -> str:
    return f"{role}-{sha256[:DIGITS]}{SUFFIX}"
