"""Saving a fitted trainer to a URL, and loading it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from daskdl.config import VERSION, check_flag
from daskdl.errors import DaskDLError, OptionError, SaveError
from daskdl.fitted.fitted import TrainerState
from daskdl.fitted.progress import (
    decode_history,
    decode_moved,
    encode_history,
    encode_moved,
)
from daskdl.fitted.reading import decode_arguments
from daskdl.fitted.writing import encode_arguments
from daskdl.saving.folder import Folder, Saved
from daskdl.saving.index import Kind
from daskdl.saving.module_state import ModuleState
from daskdl.saving.plain import Json
from daskdl.saving.references import FAILURES
from daskdl.saving.trust import Trust
from daskdl.training.fit_state import FitState, starting_model

TRAINER = Kind("daskdl trainer", 1, "trainer.json", ("model", "optimizer", "extra"))
_HIDDEN = "hidden."  # before the names of buffers that are not in the state dict


# What reading something raises that is not as it was written.
_TRIPPED = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def save(fitted: TrainerState, url: Any, optimizer: bool) -> None:
    """Put a fitted trainer into a folder; see `Trainer.save`.

    Raises:
        OptionError: If something of it cannot be saved.
        SaveError: If nothing can be written there.
    """
    check_flag("optimizer", optimizer)
    folder = Folder.at(url, TRAINER)
    state = ModuleState.of(fitted.model)
    extra = {_HIDDEN + name: buffer for name, buffer in state.hidden.items()}
    moved: dict[str, Tensor] = {}
    content = {
        "arguments": encode_arguments(fitted, extra),
        "model": state.to_json(),
        "moved": encode_moved(fitted, moved) if optimizer else None,
        "epochs": fitted.fit_state.epochs,
        "classes": None if fitted.classes is None else list(fitted.classes),
        "class_count": fitted.fit_state.class_count,
        "history": encode_history(fitted.history, extra),
    }
    contents = {"model": state.tensors, "optimizer": moved, "extra": extra}
    folder.write(content, contents, {"daskdl": VERSION, "torch": torch.__version__})


def load(url: Any, passed: Mapping[str, Any], trusted: Any = ()) -> TrainerState:
    """Read what `save` wrote.

    Args:
        url: Of the folder.
        passed: Arguments of a trainer, in place of those that were saved.
        trusted: Names of modules; see `Trainer.load`.

    Raises:
        SaveError: If there is nothing, or it is damaged, of something else, or too new.
        OptionError: Naming arguments that have to be passed, or do not fit.
    """
    folder, trust = Folder.at(url, TRAINER), Trust.of(trusted)
    saved = folder.read()
    with _named(folder.store.url):
        return _fitted(saved, passed, trust)


def _fitted(saved: Saved, passed: Mapping[str, Any], trust: Trust) -> TrainerState:
    content: Mapping[str, Json] = saved.content
    extra = saved.tensors.get("extra", {})
    arguments = decode_arguments(content["arguments"], passed, extra, trust)
    hidden = {
        name.removeprefix(_HIDDEN): tensor
        for name, tensor in extra.items()
        if name.startswith(_HIDDEN)
    }
    tensors = saved.tensors.get("model", {})
    state = ModuleState.from_json(content["model"], tensors, hidden)
    model = _model(state, arguments, "model" not in passed)
    moved, sent, residual = decode_moved(
        content["moved"], arguments, model, saved.tensors.get("optimizer", {})
    )
    epochs, classes = _count(content["epochs"]), content["class_count"]
    fit_state = FitState(
        moved, sent, epochs, None if classes is None else _count(classes), residual
    )
    history = decode_history(content["history"], extra)
    return TrainerState(
        arguments, model, fit_state, history, _classes(content["classes"])
    )


def _model(
    state: ModuleState, arguments: Mapping[str, Any], recorded: bool
) -> nn.Module:
    """The trained module, of the layers that were described or the user's own code."""
    given = arguments["model"]
    if recorded and isinstance(given, nn.Module):
        state.put_into(given)
        return given
    try:
        made: Any = starting_model(given, arguments.get("seed", 0))
    except FAILURES as error:
        if not recorded:
            raise OptionError(f"model failed: {error}") from error
        raise SaveError(f"the model cannot be made: {error}") from error
    if not isinstance(made, nn.Module):
        raise OptionError(f"model must make a torch.nn.Module, got {made!r:.80}")
    state.load_into(made)
    return made


def _classes(content: Json) -> Sequence[str] | None:
    if content is None:
        return None
    if type(content) is not list or not all(isinstance(n, str) for n in content):
        raise SaveError(f"{content!r:.80} are no names of classes")
    return content


def _count(value: Json) -> int:
    if type(value) is not int or value < 0:
        raise SaveError(f"{value!r:.80} is no count")
    return value


@contextmanager
def _named(url: str) -> Iterator[None]:
    """Errors from here get the URL; what trips over damaged content becomes ours."""
    try:
        yield
    except SaveError as error:
        raise SaveError(f"cannot load {url}: {error}") from error
    except _TRIPPED as error:
        if isinstance(error, DaskDLError):  # about what was passed
            raise
        raise SaveError(f"cannot load {url}: it is damaged: {error!r:.200}") from error
