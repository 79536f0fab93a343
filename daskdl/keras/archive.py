"""A ``.keras`` file as bytes: what it may hold, before Keras reads it.

It is a zip of a description and of weights as HDF5. Both could say that they are far
more than the file has, and HDF5 could name other files of this machine for its data.
"""

import lzma
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from daskdl.errors import ModelError
from daskdl.keras.building import gist

CONFIG = "config.json"
_WEIGHTS = "model.weights.h5"
_MEMBERS = frozenset({CONFIG, _WEIGHTS, "metadata.json"})
# A description is kilobytes; more is a bomb, for json.loads takes it all into memory.
MOST_CONFIG_BYTES = 64 * 2**20
# Beside its weights a compiled model saves what its optimizer keeps, up to five numbers
# for each (AMSGrad with moving averages and accumulated gradients), and HDF5 its index.
MOST_PER_WEIGHT = 8
INDEX_BYTES = 64 * 2**20

# What `zipfile` and those that it asks to decompress raise where bytes are wrong.
BROKEN = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError),
    *(NotImplementedError, RuntimeError, UnicodeError, ArithmeticError),
)


def description(file: Path) -> bytes:
    """Return what the model in a file is made of, as JSON.

    Raises:
        ModelError: If the file is damaged, or another one.
        OSError: If it cannot be opened.
    """
    with file.open("rb") as opened:
        try:
            with zipfile.ZipFile(opened) as archive:
                names = {entry.filename: entry for entry in archive.infolist()}
                _check_members(names, file)
                return archive.read(names[CONFIG])
        except BROKEN as error:
            raise ModelError(
                f"{file} is no file of Keras 3, or damaged: {gist(error)}"
            ) from error


def fault_of_weights(file: Path, size_bytes: int) -> str | None:
    """Say what of the weights in a file Keras would not have written; None: nothing.

    Args:
        file: With the members that `description` asks for.
        size_bytes: All weights of its model.

    Raises:
        OSError: If they cannot be read, as by damage; or what else is in `BROKEN`.
        LookupError: Likewise.
    """
    import h5py

    most = MOST_PER_WEIGHT * size_bytes + INDEX_BYTES
    with zipfile.ZipFile(file) as archive:
        size = archive.getinfo(_WEIGHTS).file_size
        if size > most:
            return _too_large(size, most)
        with archive.open(_WEIGHTS) as member, h5py.File(member) as weights:
            size = 0
            for name, link, found in _links(weights):
                if fault := _fault(name, link, found):
                    return fault
                size += getattr(found, "nbytes", 0)
    return _too_large(size, most) if size > most else None


def _links(weights: Any) -> Iterator[tuple[str, Any, Any]]:
    """All names in a file of HDF5, with the link and, if it is in there, the object."""
    import h5py

    groups, seen = [("", weights)], {weights}
    while groups:
        path, group = groups.pop()
        for name in group:
            link = group.get(name, getlink=True)
            found = group[name] if isinstance(link, h5py.HardLink) else None
            yield f"{path}{name}", link, found
            if isinstance(found, h5py.Group) and found not in seen:
                seen.add(found)
                groups.append((f"{path}{name}/", found))


def _fault(name: str, link: Any, found: Any) -> str | None:
    import h5py

    if found is None:
        return f"{name!r} is a {type(link).__name__}"
    if not isinstance(found, h5py.Dataset):
        return None
    if found.external or found.is_virtual:
        return f"the numbers of {name!r} are in another file"
    return f"{name!r} has no numbers" if found.dtype.hasobject else None


def _too_large(size: int, most: int) -> str:
    return f"they would take {size} bytes, and those of its model at most {most}"


def _check_members(names: dict[str, zipfile.ZipInfo], file: Path) -> None:
    missing = {CONFIG, _WEIGHTS} - names.keys()
    if missing:
        raise ModelError(
            f"{file} is no file of Keras 3: it has no {sorted(missing)[0]}"
        )
    others = sorted(names.keys() - _MEMBERS)
    if others:
        raise ModelError(
            f"{file} has {others[0]!r} beside the model; vocabularies and the like "
            "of preprocessing layers are not supported"
        )
    size = names[CONFIG].file_size
    if size > MOST_CONFIG_BYTES:
        raise ModelError(f"{file}: {CONFIG} has {size} bytes, more than any model")
