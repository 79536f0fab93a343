"""Keras models made of what describes them, and described again."""

import json
from typing import Any

from daskdl.data.rehearsal import MISFITS
from daskdl.errors import ModelError
from daskdl.keras.library import building, library
from daskdl.keras.nodes import JSON
from daskdl.keras.vetting import vetted

# What Keras raises when a description is wrong somewhere.
WRONG = (*MISFITS, ImportError)


def built(config: JSON, *, seeded: bool) -> Any:
    """Make a Keras model, on the CPU.

    Args:
        config: As Keras 3 writes it, vetted; not changed.
        seeded: Torch's generator decides its weights; else they are anything.

    Raises:
        ModelError: If Keras cannot make it, or its input has no shape.
    """
    with building(seeded=seeded) as keras:
        # Keras takes apart what it is given.
        own = json.loads(json.dumps(config))
        try:
            model = keras.saving.deserialize_keras_object(own, safe_mode=True)
        except WRONG as error:
            raise ModelError(
                f"Keras {keras.__version__} cannot make the model: {gist(error)}"
            ) from error
    if not isinstance(model, keras.Model):
        raise ModelError(f"expected a model, got the description of a {type(model)}")
    check_built(model)
    return model


def described(model: Any) -> JSON:
    """Return what a Keras model is made of, vetted.

    Raises:
        ModelError: If it cannot be described or has what cannot be trained.
    """
    keras = library()
    try:
        config = keras.saving.serialize_keras_object(model)
    except WRONG as error:
        raise ModelError(
            f"Keras cannot describe the model {model.name!r}: {gist(error)}"
        ) from error
    return vetted(config)


def check_built(model: Any) -> None:
    """Refuse a model without weights, since the shape of its input is not known.

    Raises:
        ModelError: If it is one.
    """
    unbuilt = [layer.name for layer in (model, *model.layers) if not layer.built]
    if unbuilt:
        raise ModelError(
            f"the shape of the input of {unbuilt[0]!r} is not known; begin the model "
            "with a keras.Input (in JSON: an InputLayer, or batch_input_shape in the "
            "first layer)"
        )


def gist(error: BaseException) -> str:
    """The line of an error of Keras that says most: it shows all settings first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'without a message'}"
