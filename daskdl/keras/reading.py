"""Keras models from JSON and from files of Keras; nothing in these is executed."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from daskdl.errors import ModelError
from daskdl.keras.archive import BROKEN, CONFIG, description, fault_of_weights
from daskdl.keras.building import WRONG, built, gist
from daskdl.keras.legacy import MODELS, modern
from daskdl.keras.library import building, library
from daskdl.keras.module import KerasModule
from daskdl.keras.nodes import JSON
from daskdl.keras.vetting import vetted
from daskdl.keras.writing import ENDING

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
