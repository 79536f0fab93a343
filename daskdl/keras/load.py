"""A ``.keras`` file as bytes: what it may hold, before Keras reads it.

It is a zip of a description and of weights as HDF5. Both could say that they are far
more than the file has, and HDF5 could name other files of this machine for its data.

Keras models from JSON and from files of Keras; nothing in these is executed.
"""

import json
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from daskdl.errors import ModelError
from daskdl.keras.convert import JSON, MODELS, modern
from daskdl.keras.module import (
    ENDING,
    WRONG,
    KerasModule,
    building,
    built,
    gist,
    library,
    vetted,
)

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


# What rewriting raises where something is missing, or of another kind.
_MALFORMED = (LookupError, TypeError, AttributeError, RecursionError)
_DAMAGED = (*WRONG, *BROKEN)


def from_config(
    path_or_json: str | os.PathLike[str] | Mapping[str, Any],
) -> KerasModule:
    """Make a model of what Keras' `model.to_json()` wrote, Keras 2 or Keras 3.

    Its weights are new: made by its initialisers, from torch's random generator. With
    ``Trainer(model=lambda: daskdl.keras.from_config(path), seed=...)`` the seed of the
    trainer decides them.

    Args:
        path_or_json: The path of a local file, the JSON itself, or what
            ``json.loads`` made of it. Sequential or functional.

    Returns:
        A module of torch, on the CPU.

    Raises:
        ModelError: If it is no such model, or has a layer that Keras 3 does not have,
            that is made of code, or that cannot be trained; by name.
        OptionError: If Keras 3 is not there, or on another backend than PyTorch.
        OSError: If the file cannot be read.
    """
    config, where = _read(path_or_json)
    return KerasModule(built(_understood(config, where), seeded=True))


def from_saved(path: str | os.PathLike[str]) -> KerasModule:
    """Load a model with its weights from a ``.keras`` file, as Keras 3 saves it.

    What it was compiled with is left out: the trainer has a loss and an optimizer.

    Args:
        path: Of a local file.

    Returns:
        A module of torch, on the CPU.

    Raises:
        ModelError: As `from_config`, and if the file is damaged or another one.
        OptionError: If Keras 3 is not there, or on another backend than PyTorch.
        OSError: If the file cannot be read.
    """
    file = Path(path)
    if file.suffix != ENDING:
        raise ModelError(
            f"expected a file that ends in {ENDING!r}, got {str(path)!r}; load others "
            f"with keras.saving.load_model, and save them as {ENDING}"
        )
    config = _parsed(description(file), f"{file}: {CONFIG}")
    model = built(_understood(config, str(file)), seeded=False)
    with building(seeded=False):
        try:
            size_bytes = sum(weight.value.nbytes for weight in model.variables)
            fault = fault_of_weights(file, size_bytes)
            if fault is None:
                model.load_weights(file)
        except _DAMAGED as error:
            raise ModelError(
                f"{file} has not the weights of its model: {gist(error)}"
            ) from error
    if fault is not None:
        raise ModelError(f"{file} has weights that Keras does not write: {fault}")
    return KerasModule(model)


def _read(given: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[JSON, str]:
    """The JSON, and how to speak of it."""
    if isinstance(given, Mapping):
        return dict(given), "the configuration"
    if isinstance(given, str) and given.lstrip().startswith("{"):
        return _parsed(given, "the configuration"), "the configuration"
    if not isinstance(given, str | os.PathLike):
        raise ModelError(
            "path_or_json must be the path of a file, JSON, or what json.loads made "
            f"of it, got {given!r}"
        )
    file = Path(given)
    return _parsed(file.read_bytes(), str(file)), str(file)


def _parsed(text: str | bytes, where: str) -> JSON:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is no JSON: {gist(error)}") from error


def _understood(config: JSON, where: str) -> JSON:
    """A description of either Keras, as Keras 3 writes it, of known layers only."""
    library()
    kind = config.get("class_name") if isinstance(config, dict) else type(config)
    if kind not in MODELS or not isinstance(config.get("config"), dict | list):
        raise ModelError(
            f"{where} is no Sequential or functional model of Keras: it must have a "
            f"config, and a class_name out of {', '.join(MODELS)}, got {kind!r}"
        )
    try:
        return vetted(modern(config))
    except _MALFORMED as error:
        raise ModelError(f"{where} is not as Keras writes it: {gist(error)}") from error
