"""The arguments of a trainer as JSON: each in the way that suits it, or not at all.

Each is a mapping that says how it was written:

==========================================  ==========================================
``{"value": ...}``                          plain, see :mod:`daskdl.saving.json_values`
``{"layers": ...}``                         see :mod:`daskdl.saving.module_state`
``{"import": ...}``, ``{"partial": ...}``   see :mod:`daskdl.saving.json_values`
``{"normaliser": ...}``                     as `daskdl.data.Normalization.to_dict`
``{"both": [..., ...]}``                    two transforms, one after the other
``{"pass": "why"}``                         has to be given to `Trainer.load` again
==========================================  ==========================================

What a trainer is after a fit: the one value that is saved and loaded.

The fit state and the history of a trainer, as JSON and tensors.

What a trainer is made with, from JSON; see :mod:`.arguments`.

What a trainer was made with, as JSON; see :mod:`.arguments`.

Saving a fitted trainer to a URL, and loading it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from daskdl.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    Evaluate,
    FailureInjection,
)
from daskdl.config import VERSION, check_flag
from daskdl.data.checks import USER_ERRORS, trainable
from daskdl.data.inputs import Compose
from daskdl.data.normalize import Normalization
from daskdl.errors import DaskDLError, OptionError, SaveError
from daskdl.history import LAYOUT, History, Stopping, unpack_rows
from daskdl.residuals import KeepResidual, ResidualClipping, ResidualPostProcessor
from daskdl.saving import module_state
from daskdl.saving.folder import Folder, Kind, Saved
from daskdl.saving.json_values import (
    FAILURES,
    NOTHING,
    Json,
    Plain,
    Trust,
    decode_maker,
    encode_maker,
    optimizer_maker,
    scheduler_maker,
)
from daskdl.saving.module_state import ModuleState
from daskdl.thresholds import (
    AdaptiveThreshold,
    FixedThreshold,
    LayerThresholds,
    LinkThreshold,
    Sent,
    TargetSparsityThreshold,
    ThresholdAlgorithm,
)
from daskdl.training.base import (
    CompressionState,
    KeptResidual,
    TrainingMaster,
    described,
)
from daskdl.training.epoch_control import LearningRate, Scheduling
from daskdl.training.fit_state import FitState, TrainedOptimizer, starting_model
from daskdl.training.gradient_sharing import GradientSharing
from daskdl.training.parameter_averaging import ParameterAveraging

# In the order in which they are read; those of a trainer besides its client.
NAMES = (
    "model",
    "loss",
    "optimizer",
    "master",
    "device",
    "seed",
    "callbacks",
    "progress",
    "autocast",
    "accumulate",
    "clip_grad_norm",
    "step",
    "scheduler",
    "scheduler_every",
    "telemetry_every",
    "max_loss_rise",
    "transform",
)
# Written by the names they have here: a name stays when a class moves.
KNOWN: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        GradientSharing,
        ParameterAveraging,
        AdaptiveThreshold,
        FixedThreshold,
        TargetSparsityThreshold,
        LinkThreshold,
        LayerThresholds,
        ResidualClipping,
        KeepResidual,
        FailureInjection,
        Checkpoint,
        EarlyStopping,
        Evaluate,
    )
}
BASES = (TrainingMaster, ThresholdAlgorithm, ResidualPostProcessor, Callback)
# What those make that are called.
MADE: Mapping[str, type] = {
    "model": nn.Module,
    "loss": Tensor,
    "optimizer": Optimizer,
    "step": Tensor,
    "scheduler": LRScheduler,
    "transform": tuple,
}


def plain_with(tensors: dict[str, Tensor], trust: Trust = NOTHING) -> Plain:
    """Writes and reads the values of arguments.

    Args:
        tensors: Beside the JSON; writing adds to them.
        trust: What may be imported, and called with arguments, when reading.
    """
    return Plain(KNOWN, BASES, tensors, trust)


@dataclass(frozen=True, eq=False)
class TrainerState:
    """A trainer without its client.

    Attributes:
        arguments: What it was made with, by name; the client is not among them.
        model: Trained.
        fit_state: What the next fit goes on from, beside the model.
        history: Of the last fit.
        classes: Names of the labels, if the data had such.
    """

    arguments: Mapping[str, Any]
    model: nn.Module
    fit_state: FitState
    history: History
    classes: Sequence[str] | None


def new_optimizer(arguments: Mapping[str, Any], model: nn.Module) -> Optimizer:
    """An optimizer over a model, as a trainer of such arguments makes it now.

    Raises:
        OptionError: If it makes none.
    """
    parameters = trainable(model)
    try:
        made: Any = arguments["optimizer"](list(parameters))
    except USER_ERRORS as error:
        raise OptionError(
            f"optimizer failed on a list of {len(parameters)} parameters: {error}"
        ) from error
    if not isinstance(made, Optimizer):
        raise OptionError(
            f"optimizer must return a torch.optim.Optimizer, got {made!r}"
        )
    return made


COLUMNS = {column[1] for column in LAYOUT.descr}  # kinds of columns of steps
PARTS = {"rows", "stopping", "layout"}  # of a history
STOPPING = {"Stopping": Stopping}
STEPS = "history.steps"  # name of the tensor with the packed rows of steps


def encode_moved(fitted: TrainerState, tensors: dict[str, Tensor]) -> Json:
    """Write the state of the optimizer, the scheduler and the thresholds.

    Args:
        fitted: Not changed.
        tensors: Gets those of the state.

    Raises:
        OptionError: If something of it cannot be written, or the trainer has been given
            another optimizer since.
    """
    moved, sent = fitted.fit_state.optimizer, fitted.fit_state.compression
    if moved is None:
        raise OptionError("the trainer has no optimizer_; fit it, or optimizer=False")
    _check_kept(moved.optimizer, new_optimizer(fitted.arguments, fitted.model))
    plain = Plain(tensors=tensors)
    scheduling = scheduling_of(fitted.arguments)
    position = moved.rate.position() if moved.scheduling == scheduling else None
    return {
        "optimizer": _class_of(moved.optimizer),
        "state": plain.encode(moved.optimizer.state_dict(), "optimizer"),
        "made": plain.encode(moved.made, "optimizer.made"),
        "scheduler": None if position is None else _class_of(moved.rate.scheduler),
        "position": plain.encode(position, "scheduler"),
        "sent": None if sent is None else _encoded_sent(sent),
        "residual": plain.encode(_residual_values(fitted), "residual"),
    }


def decode_moved(
    content: Json, arguments: Mapping[str, Any], model: nn.Module, given: Any
) -> tuple[TrainedOptimizer, CompressionState | None, KeptResidual | None]:
    """Make the optimizer and its scheduler, give them their state, and read the rest.

    Args:
        content: What `encode_moved` wrote, or something damaged; None: they begin anew.
        arguments: Of the trainer.
        model: With its parameters.
        given: The tensors of the state, by name.

    Raises:
        SaveError: If it is damaged.
        OptionError: If optimizer or scheduler are of another class than those saved.
    """
    optimizer, scheduling = new_optimizer(arguments, model), scheduling_of(arguments)
    moved = TrainedOptimizer.new(optimizer, scheduling, model)
    if content is None:
        return moved, None, None
    plain = Plain(tensors=dict(given))
    _check_class("optimizer", optimizer, content["optimizer"])
    try:
        optimizer.load_state_dict(plain.decode(content["state"]))
    except USER_ERRORS as error:
        raise SaveError(f"the optimizer refuses its state: {error}") from error
    position = plain.decode(content["position"])
    if position is not None:
        _check_class("scheduler", moved.rate.scheduler, content["scheduler"])
        _go_on_(moved.rate, position)
    sent = content["sent"]
    before = plain.decode(content.get("made"))
    if before is not None:
        moved = moved._replace(made=_made_of(before, len(moved.made)))
    residual = _residual_of(plain.decode(content.get("residual")), model)
    return moved, None if sent is None else _decoded_sent(sent), residual


def scheduling_of(arguments: Mapping[str, Any]) -> Scheduling:
    """How the learning rate changes, by the arguments of a trainer."""
    every = arguments.get("scheduler_every", "epoch")
    return Scheduling(arguments.get("scheduler"), every)


def encode_history(history: History, tensors: dict[str, Tensor]) -> Json:
    """Write the rows of a history; those of single steps as a tensor of bytes."""
    packed = history.steps.packed()
    if packed:
        tensors[STEPS] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    plain = Plain(STOPPING)
    return {
        "rows": plain.encode([dict(row) for row in history], "history"),
        "stopping": plain.encode(history.stopping, "history.stopping"),
        # A later release has other columns.
        "layout": [list(column) for column in LAYOUT.descr],
    }


def decode_history(content: Json, tensors: Mapping[str, Tensor]) -> History:
    """Read a history.

    Raises:
        SaveError: If it is damaged.
    """
    if not isinstance(content, dict) or content.keys() != PARTS:
        raise SaveError(f"the history is {content!r:.80}")
    rows = Plain().decode(content["rows"])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SaveError(f"the history is {rows!r:.80}")
    history = History(rows)
    stopping = Plain(STOPPING).decode(content["stopping"])
    if stopping is not None and not isinstance(stopping, Stopping):
        raise SaveError(f"early stopping is {stopping!r:.80}")
    history.stopping = stopping
    if STEPS in tensors:
        try:
            packed = tensors[STEPS].numpy().tobytes()
            history.steps.extend(unpack_rows(packed, _layout(content["layout"])))
        except (ValueError, TypeError) as error:
            raise SaveError(f"the rows of steps are damaged: {error}") from error
    return history


def _layout(columns: Any) -> np.dtype[Any]:
    named = [(name, kind) for name, kind in columns]
    wrong = [c for c in named if not isinstance(c[0], str) or c[1] not in COLUMNS]
    if wrong:
        raise ValueError(f"columns {wrong!r:.80}")
    return np.dtype(named)


def _check_kept(had: Optimizer, makes: Optimizer) -> None:
    ours, theirs = ([len(g["params"]) for g in o.param_groups] for o in (had, makes))
    if type(had) is not type(makes) or ours != theirs:
        raise OptionError(
            f"optimizer makes a {_class_of(makes)} of {theirs} parameters, and the "
            f"state after the last fit is of a {_class_of(had)} of {ours}; save "
            "without it, optimizer=False, or fit first"
        )


def _class_of(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _check_class(argument: str, made: Any, saved: Json) -> None:
    if _class_of(made) != saved:
        raise OptionError(
            f"{argument} makes a {_class_of(made)}, and the saved state is of a "
            f"{saved}; to train on with another, make a new Trainer with the model_ of "
            "the one that is loaded"
        )


def _go_on_(rate: LearningRate, position: Any) -> None:
    try:
        count, own = position
        wrong = [k for k in own if callable(getattr(rate.scheduler, k, None))]
        if wrong or type(count) is not int:
            raise SaveError(f"the state of the scheduler has {count!r:.80}, {wrong}")
        rate.go_on_(count, own)
    except USER_ERRORS as error:
        raise SaveError(f"the scheduler refuses its state: {error}") from error


def _encoded_sent(outcome: CompressionState) -> Json:
    sent = [[p, float(s.threshold), float(s.density)] for p, s in outcome.sent.items()]
    return {"sent": sent, "steps": int(outcome.steps)}


def _made_of(groups: Any, count: int) -> list[dict[str, Any]]:
    right = isinstance(groups, list) and len(groups) == count
    if not right or not all(isinstance(group, dict) for group in groups):
        raise SaveError(f"the optimizer was made with {groups!r:.80}")
    return list(groups)


def _residual_values(fitted: TrainerState) -> Any:
    residual = fitted.fit_state.residual
    if residual is None or not residual.fits(fitted.model):
        return None
    return {"counts": torch.from_numpy(residual.counts_N), "grid": residual.grid}


def _residual_of(values: Any, model: nn.Module) -> KeptResidual | None:
    if values is None:
        return None
    counts, grid = values["counts"], values["grid"]
    size = sum(p.numel() for p in trainable(model))
    if counts.dtype != torch.int32 or tuple(counts.shape) != (size,):
        raise SaveError(
            f"what was not sent is {described(counts)}, and the model has {size} "
            "trainable parameters"
        )
    if not isinstance(grid, float) or not (0 < grid < math.inf):
        raise SaveError(f"what was not sent is in steps of {grid!r:.80}")
    return KeptResidual.beside(model, counts.numpy(), grid)


def _decoded_sent(content: Mapping[str, Json]) -> CompressionState:
    sent = {}
    rows: Sequence[Any] = content["sent"]
    for pattern, threshold, density in rows:
        numbers = isinstance(threshold, float) and isinstance(density, float)
        if not (isinstance(pattern, str) and numbers and 0 < threshold < math.inf):
            raise SaveError(f"the threshold of {pattern!r:.80} is {threshold!r:.80}")
        sent[pattern] = Sent(threshold, density)
    steps = content["steps"]
    if type(steps) is not int or steps < 0:
        raise SaveError(f"the threshold is of {steps!r:.80} steps")
    return CompressionState(sent, steps)


def decode_arguments(
    content: Mapping[str, Json],
    passed: Mapping[str, Any],
    extra: Mapping[str, Tensor],
    trust: Trust,
) -> dict[str, Any]:
    """Read the arguments of a trainer; a described model is left as its layers.

    Args:
        content: What `encode_arguments` wrote, or something damaged.
        passed: By name, in place of what is there.
        extra: The tensors among them.
        trust: What may be imported, and called with arguments.

    Raises:
        SaveError: If it is damaged.
        OptionError: Naming each that has to be passed, and why.
    """
    unknown = [name for name in content if name not in NAMES]
    if unknown:
        raise SaveError(f"a trainer has no argument {unknown[0]!r:.80}")
    _check_passed(passed)
    plain = plain_with(dict(extra), trust)
    read, missing = dict(passed), {}
    for name in NAMES:
        if name in passed or name not in content:
            continue
        try:
            read[name] = _decoded(name, content[name], plain)
        except OptionError as error:
            missing[name] = str(error)
    if missing:
        raise OptionError(_asking(missing))
    return read


def _check_passed(passed: Mapping[str, Any]) -> None:
    wrong = [name for name in passed if name not in NAMES]
    if wrong:
        raise OptionError(
            f"Trainer has no argument {wrong[0]!r}; of those that it has, any can be "
            f"passed: {', '.join(NAMES)}"
        )


def _asking(missing: Mapping[str, str]) -> str:
    why = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
    return (
        f"pass {' and '.join(missing)} to Trainer.load as to Trainer: what was saved "
        f"does not make them without code ({why})"
    )


def _decoded(name: str, content: Json, plain: Plain) -> Any:
    if "pass" in content:
        raise OptionError(content["pass"])
    if set(content) == {"value"}:
        return plain.decode(content["value"])
    if name not in MADE:
        raise SaveError(f"{name} is written as {content!r:.80}")
    if name == "transform":
        return _decoded_transform(content, plain)
    if name == "model" and set(content) == {"layers"}:
        return module_state.build(content["layers"])
    if name == "loss" and "layers" in content:
        return _decoded_module(content, plain)
    return decode_maker(content, MADE[name], plain)


def _decoded_transform(content: Json, plain: Plain) -> Any:
    if set(content) == {"normaliser"}:
        try:
            return Normalization.from_dict(content["normaliser"])
        except OptionError as error:
            raise SaveError(f"the normaliser is damaged: {error}") from error
    if set(content) == {"both"}:
        first, then = (_decoded_transform(one, plain) for one in content["both"])
        return Compose(first, then)
    return decode_maker(content, tuple, plain)


def _decoded_module(content: Mapping[str, Json], plain: Plain) -> nn.Module:
    module = module_state.build(content["layers"])
    tensors = plain.decode(content["tensors"])
    ModuleState.from_json(content["state"], tensors, {}).put_into(module)
    return module


def encode_arguments(fitted: TrainerState, extra: dict[str, Tensor]) -> dict[str, Json]:
    """Write all arguments of a trainer.

    Args:
        fitted: Not changed.
        extra: Gets the tensors among them.
    """
    content = {}
    for name, value in fitted.arguments.items():
        own: dict[str, Tensor] = {}
        try:
            content[name] = _encoded(name, value, fitted, own)
        except OptionError as error:
            content[name] = {"pass": str(error)}
        else:
            extra.update(own)
    return content


def _encoded(
    name: str, value: Any, fitted: TrainerState, own: dict[str, Tensor]
) -> Json:
    plain = plain_with(own)
    if name not in MADE or value is None:
        return _checked(plain, _simple(value), name)
    if name == "transform":
        return _encoded_transform(value, plain)
    if name == "loss" and isinstance(value, nn.Module):
        return _encoded_module(value, plain)
    ways: Mapping[str, Callable[[], Json]] = {
        "model": lambda: {"layers": module_state.describe(fitted.model, name)},
        "optimizer": lambda: _maker(name, _own_optimizer(fitted), plain),
        "scheduler": lambda: _maker(name, _own_scheduler(fitted), plain),
    }
    if name not in ways:
        return _maker(name, value, plain)
    try:
        return ways[name]()
    except OptionError as first:
        try:
            return _maker(name, value, plain)
        except OptionError as second:
            raise OptionError(f"{first}, and {second}") from second


def _simple(value: Any) -> Any:
    if isinstance(value, torch.device):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _checked(plain: Plain, value: Any, name: str) -> Json:
    content = plain.encode(value, name)
    try:
        same = plain.decode(content) == value
    except SaveError as error:
        raise OptionError(f"{name} is not read as it was written: {error}") from error
    if not same:
        raise OptionError(f"{value!r:.200} is not equal to what is read of it")
    return {"value": content}


def _maker(name: str, value: Any, plain: Plain) -> Json:
    return encode_maker(value, MADE[name], plain, name)


def _encoded_transform(value: Any, plain: Plain) -> Json:
    if isinstance(value, Normalization):
        return {"normaliser": value.to_dict()}
    if isinstance(value, Compose):
        return {
            "both": [_encoded_transform(t, plain) for t in (value.first, value.then)]
        }
    return _maker("transform", value, plain)


def _encoded_module(module: nn.Module, plain: Plain) -> Json:
    """A loss of torch: layers, and the tensors it has, class weights for one."""
    plan, state = module_state.describe(module, "loss"), ModuleState.of(module)
    tensors = plain.encode({**state.tensors, **state.hidden}, "loss")
    return {"layers": plan, "tensors": tensors, "state": state.to_json()}


def _own_optimizer(fitted: TrainerState) -> Any:
    parameters = trainable(fitted.model)
    return optimizer_maker(new_optimizer(fitted.arguments, fitted.model), parameters)


def _own_scheduler(fitted: TrainerState) -> Any:
    try:
        made = fitted.arguments["scheduler"](
            new_optimizer(fitted.arguments, fitted.model)
        )
    except USER_ERRORS as error:
        raise OptionError(f"scheduler failed on a new optimizer: {error}") from error
    return scheduler_maker(made, lambda: new_optimizer(fitted.arguments, fitted.model))


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


def save(
    fitted: TrainerState,
    url: Any,
    optimizer: bool,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Put a fitted trainer into a folder; see `Trainer.save`.

    Raises:
        OptionError: If something of it cannot be saved.
        SaveError: If nothing can be written there.
    """
    check_flag("optimizer", optimizer)
    folder = Folder.at(url, TRAINER, storage_options)
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


def load(
    url: Any,
    passed: Mapping[str, Any],
    trusted: Any = (),
    storage_options: Mapping[str, Any] | None = None,
) -> TrainerState:
    """Read what `save` wrote.

    Args:
        url: Of the folder.
        passed: Arguments of a trainer, in place of those that were saved.
        trusted: Names of modules; see `Trainer.load`.
        storage_options: fsspec options of the URL.

    Raises:
        SaveError: If there is nothing, or it is damaged, of something else, or too new.
        OptionError: Naming arguments that have to be passed, or do not fit.
    """
    folder, trust = Folder.at(url, TRAINER, storage_options), Trust.of(trusted)
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
