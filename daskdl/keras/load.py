"""Loads Keras models from JSON, ``.keras`` and ``.h5`` files without executing code.

A ``.keras`` file is a zip archive of a description in JSON and weights in HDF5; an
``.h5`` file is HDF5 with the description as an attribute. Sizes are checked before
anything is unpacked, and HDF5 must not refer to other files.
"""

import contextlib
import json
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from daskdl.errors import ModelError
from daskdl.keras.module import (
    JSON,
    KERAS_ERRORS,
    MODELS,
    SUFFIX,
    KerasModule,
    building,
    built,
    last_line,
    library,
    to_keras3,
    vetted,
)

HDF5 = (".h5", ".hdf5")
_CONFIG, _WEIGHTS = "config.json", "model.weights.h5"
_MEMBERS = frozenset({_CONFIG, _WEIGHTS, "metadata.json"})
# A usual description has kilobytes; json.loads reads all of it into memory.
MAX_CONFIG_BYTES = 64 * 2**20
# A compiled model also saves the state of its optimizer, up to five numbers per weight
# (AMSGrad with moving averages and accumulated gradients); HDF5 adds an index.
MAX_PER_WEIGHT = 8
INDEX_BYTES = 64 * 2**20

# Raised by `zipfile` and the decompressors for damaged bytes.
READING_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError),
    *(NotImplementedError, RuntimeError, UnicodeError, ArithmeticError),
)
# Raised by `to_keras3` and `vetted` for missing keys and values of a wrong type.
_MALFORMED = (LookupError, TypeError, AttributeError, RecursionError)


def from_config(
    path_or_json: str | os.PathLike[str] | Mapping[str, Any],
) -> KerasModule:
    """Create a model from the result of `model.to_json()` in Keras 2 or Keras 3.

    The initializers draw new weights from torch's random generator. With
    ``Trainer(model=lambda: daskdl.keras.from_config(path), seed=...)``, the trainer's
    seed determines the weights.

    Args:
        path_or_json: A Sequential or functional model: the path of a local file, the
            JSON itself, or the result of ``json.loads``.

    Returns:
        A torch module on the CPU.

    Raises:
        ModelError: If the JSON does not describe such a model, or a layer is not part
            of Keras 3, contains code, or cannot be trained; the message names the
            layer.
        OptionError: If Keras 3 is missing, or does not run on PyTorch.
        OSError: If the file cannot be read.
    """
    where = "the configuration"
    if isinstance(path_or_json, str) and path_or_json.lstrip().startswith("{"):
        config = _parsed(path_or_json, where)
    elif isinstance(path_or_json, str | os.PathLike):
        where = str(path_or_json)
        config = _parsed(Path(path_or_json).read_bytes(), where)
    elif isinstance(path_or_json, Mapping):
        config = dict(path_or_json)
    else:
        raise ModelError(
            "path_or_json must be the path of a file, JSON text, or the result of "
            f"json.loads, got {path_or_json!r}"
        )
    module = KerasModule(built(_checked(config, where), seeded=True))
    return _with_settings(module, config)


def from_saved(path: str | os.PathLike[str]) -> KerasModule:
    """Load a model with its weights from a file.

    The model's compile settings are the trainer's defaults for loss, optimizer and
    metrics; the state of the saved optimizer is ignored.

    Args:
        path: Path of a local file: a ``.keras`` file of Keras 3, or an ``.h5`` or
            ``.hdf5`` file of Keras 2 or Keras 3 that contains a whole model.

    Returns:
        A torch module on the CPU.

    Raises:
        ModelError: As in `from_config`, and if the file is damaged or of another kind.
        OptionError: If Keras 3 is missing, or does not run on PyTorch.
        OSError: If the file cannot be read.
    """
    file = Path(path)
    if file.suffix in HDF5:
        config, compiled = _description_in_hdf5(file)
    elif file.suffix == SUFFIX:
        config = _parsed(_description(file), f"{file}: {_CONFIG}")
        compiled = None
    else:
        raise ModelError(
            f"path must end in {SUFFIX!r}, '.h5' or '.hdf5', got {str(path)!r}; load "
            f"other files with keras.saving.load_model, and save them as {SUFFIX}"
        )
    model = built(_checked(config, str(file)), seeded=False)
    with building(seeded=False):
        try:
            fault = _fault_of_weights(file, model)
            if fault is None:
                model.load_weights(file)
        except (*KERAS_ERRORS, *READING_ERRORS) as error:
            raise ModelError(
                f"the weights in {file} do not fit its model: {last_line(error)}"
            ) from error
    if fault is not None:
        raise ModelError(f"{file} has weights that Keras does not write: {fault}")
    return _with_settings(KerasModule(model), config, compiled)


def _with_settings(
    module: KerasModule, config: JSON, compiled: JSON = None
) -> KerasModule:
    """Keep the compile settings of a model; a trainer reads and checks them."""
    settings = config.get("compile_config") if compiled is None else compiled
    if isinstance(settings, Mapping):
        module.__dict__["_compile_config"] = dict(settings)
    return module


def _parsed(text: str | bytes, where: str) -> JSON:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not valid JSON: {last_line(error)}") from error


def _checked(config: JSON, where: str) -> JSON:
    """Return a vetted description, converted to Keras 3."""
    library()
    kind = config.get("class_name") if isinstance(config, dict) else type(config)
    if kind not in MODELS or not isinstance(config.get("config"), dict | list):
        raise ModelError(
            f"{where} is not a Sequential or functional model of Keras: it must have a "
            f"config, and a class_name among {', '.join(MODELS)}, got {kind!r}"
        )
    try:
        return vetted(to_keras3(config))
    except _MALFORMED as error:
        raise ModelError(
            f"{where} does not have the structure that Keras writes: {last_line(error)}"
        ) from error


def _description(file: Path) -> bytes:
    """Read the description in a ``.keras`` file, and check the file's members."""
    with file.open("rb") as opened:
        try:
            with zipfile.ZipFile(opened) as archive:
                names = {entry.filename: entry for entry in archive.infolist()}
                for missing in sorted({_CONFIG, _WEIGHTS} - names.keys()):
                    raise ModelError(f"{file} is not a Keras 3 file: no {missing}")
                for extra in sorted(names.keys() - _MEMBERS):
                    raise ModelError(
                        f"{file} contains {extra!r} beside the model; vocabularies and "
                        "other files of preprocessing layers are not supported"
                    )
                size = names[_CONFIG].file_size
                if size > MAX_CONFIG_BYTES:
                    raise ModelError(
                        f"{file}: {_CONFIG} has {size} bytes, but at most "
                        f"{MAX_CONFIG_BYTES} are allowed"
                    )
                return archive.read(names[_CONFIG])
        except READING_ERRORS as error:
            raise ModelError(
                f"{file} is not a Keras 3 file, or is damaged: {last_line(error)}"
            ) from error


def _description_in_hdf5(file: Path) -> tuple[JSON, JSON]:
    """Read the description of a model, and its compile settings if there are any."""
    with _opened(file) as weights:
        text = weights.attrs.get("model_config")
        if text is None:
            raise ModelError(
                f"{file} contains no model, perhaps only weights; create the model "
                "with Keras, call model.load_weights(path), and pass the model"
            )
        where = f"{file}: model_config"
        if not isinstance(text, str | bytes) or len(text) > MAX_CONFIG_BYTES:
            raise ModelError(
                f"{where} must be text of at most {MAX_CONFIG_BYTES} characters"
            )
        compiled = weights.attrs.get("training_config")
        if isinstance(compiled, str | bytes):
            compiled = _parsed(compiled, f"{file}: training_config")
        if isinstance(compiled, Mapping):
            optimizer = compiled.get("optimizer_config")
            return _parsed(text, where), {**compiled, "optimizer": optimizer}
        return _parsed(text, where), None


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open an HDF5 file, or the weights in a ``.keras`` file."""
    library()
    import h5py

    with contextlib.ExitStack() as stack:
        try:
            opened: Any = stack.enter_context(file.open("rb"))
            if file.suffix == SUFFIX:
                archive = stack.enter_context(zipfile.ZipFile(opened))
                opened = stack.enter_context(archive.open(_WEIGHTS))
            weights = stack.enter_context(h5py.File(opened))
        except FileNotFoundError:
            raise
        except READING_ERRORS as error:
            raise ModelError(
                f"{file} is not an HDF5 file, or is damaged: {last_line(error)}"
            ) from error
        yield weights


def _fault_of_weights(file: Path, model: Any) -> str | None:
    """Return the reason why the weights in a file are refused, or None."""
    model_bytes = sum(weight.value.nbytes for weight in model.variables)
    limit = MAX_PER_WEIGHT * model_bytes + INDEX_BYTES
    size = file.stat().st_size
    if file.suffix == SUFFIX:
        with zipfile.ZipFile(file) as archive:
            size = archive.getinfo(_WEIGHTS).file_size
    if size <= limit:
        with _opened(file) as weights:
            nbytes = _size_of(weights)
        if isinstance(nbytes, str):
            return nbytes
        size = nbytes
    if size <= limit:
        return None
    return f"they would take {size} bytes, but those of its model at most {limit}"


def _size_of(weights: Any) -> int | str:
    """Return the size of all arrays in HDF5, bytes, or the reason to refuse them."""
    import h5py

    size, groups, seen = 0, [("", weights)], {weights}
    while groups:
        path, group = groups.pop()
        for name in group:
            link, at = group.get(name, getlink=True), f"{path}{name}"
            if not isinstance(link, h5py.HardLink):
                return f"{at!r} is a {type(link).__name__}"
            member = group[name]
            if isinstance(member, h5py.Dataset):
                if member.external or member.is_virtual:
                    return f"the values of {at!r} are in another file"
                if member.dtype.hasobject:
                    return f"the values of {at!r} are not numbers"
                size += member.nbytes
            elif member not in seen:
                seen.add(member)
                groups.append((f"{at}/", member))
    return size
