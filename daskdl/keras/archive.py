"""A ``.keras`` file as bytes: what it may hold, before Keras reads it.

It is a zip of a description and of weights as HDF5. Both could say that they are far
more than the file has, and HDF5 could name other files of this machine for its data.
"""

import lzma
import zipfile
import zlib
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
            links: dict[str, Any] = {}
            weights.visititems_links(links.__setitem__)
            for name, link in links.items():
                if not isinstance(link, h5py.HardLink):
                    return f"{name!r} is a {type(link).__name__}"
            found = {name: weights[name] for name in links}
            arrays = {n: o for n, o in found.items() if isinstance(o, h5py.Dataset)}
            size = sum(array.nbytes for array in arrays.values())
            faults = filter(None, map(_fault, arrays, arrays.values()))
            return next(faults, _too_large(size, most) if size > most else None)


def _fault(name: str, array: Any) -> str | None:
    if array.external or array.is_virtual:
        return f"the numbers of {name!r} are in another file"
    return f"{name!r} has no numbers" if array.dtype.hasobject else None


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
