"""Saves of fitted trainers: JSON and tensors in a folder.

Nothing is pickled: arguments that JSON cannot describe must be passed to `Trainer.load`
again.
"""

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from daskdl import callbacks
from daskdl.channel.protocol import Natural, check
from daskdl.compression import thresholds
from daskdl.compression.residuals import KeepResidual, ResidualClipping
from daskdl.config import check_flag
from daskdl.data.checks import (
    optimizer_failed,
    optimizer_function,
    optimizer_of,
    trainable,
)
from daskdl.data.inputs import Compose
from daskdl.data.manifest import ManifestFormat
from daskdl.data.unreadable import USER_ERRORS
from daskdl.errors import OptionError, SaveError
from daskdl.keras.module import KerasModule
from daskdl.observe.history import History, RunRecord, Stopping
from daskdl.observe.tables import LayerRow, LayerTable, StepRow, layout_of, unpack_rows
from daskdl.observe.timeline import SPANS, Timeline
from daskdl.saving.folder import SaveFolder, encode_tensors, folder_store
from daskdl.saving.json_values import (
    FAILURES,
    ArgumentValues,
    Json,
    JsonValues,
    UntrustedError,
    trusted_modules,
)
from daskdl.training.base import checksum_of, evaluating_in
from daskdl.training.checkpointing import Fingerprint
from daskdl.training.epoch_control import Scheduling, hyperparameters
from daskdl.training.fit_spec import FitState, TrainedOptimizer, starting_model
from daskdl.training.gradient_sharing import GradientSharing
from daskdl.training.parameter_averaging import ParameterAveraging
from daskdl.training.state import described, differing_wrappers, restoring

ROLES = ("model", "optimizer", "extra")
KIND = ManifestFormat(
    "daskdl trainer",
    1,
    "trainer.json",
    "give the URL of a folder that Trainer.save has written",
    "save the trainer again",
)


@dataclass(frozen=True)
class ParameterGroups:
    """Creates an optimizer with several groups of parameters."""

    optimizer: Callable[..., Optimizer]
    defaults: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    places: Sequence[Sequence[int]]

    def __call__(self, parameters: Sequence[nn.Parameter]) -> Optimizer:
        """Create an optimizer of all trainable parameters."""
        groups = [
            {**options, "params": [parameters[i] for i in places]}
            for options, places in zip(self.groups, self.places, strict=True)
        ]
        return self.optimizer(groups, **self.defaults)


# Classes by the names in saves, which stay when a class moves to another module.
KNOWN: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (
        GradientSharing,
        ParameterAveraging,
        thresholds.AdaptiveThreshold,
        thresholds.FixedThreshold,
        thresholds.TargetSparsityThreshold,
        thresholds.SampledThreshold,
        thresholds.LayerThresholds,
        ResidualClipping,
        KeepResidual,
        callbacks.Checkpoint,
        callbacks.EarlyStopping,
        callbacks.Evaluate,
        callbacks.LayerMonitor,
        Compose,
        ParameterGroups,
    )
}


@dataclass(frozen=True, eq=False)
class TrainerState:
    """A trainer without its client."""

    arguments: Mapping[str, Any]  # of the trainer, by name
    model: nn.Module
    fit_state: FitState  # from which the next fit continues
    history: History  # of the last fit
    classes: Sequence[str] | None  # names of the labels


def save(
    state: TrainerState,
    url: Any,
    optimizer: bool,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Save a fitted trainer; see `Trainer.save`."""
    check_flag("optimizer", optimizer)
    folder = SaveFolder(folder_store(url, storage_options), KIND, ROLES)
    trained, extra = JsonValues(), JsonValues()
    evaluating = evaluating_in(state.model, state.fit_state.evaluating)
    model = replace(ModelState.of(state.model), evaluating=list(evaluating))
    content = {
        "arguments": _encode_arguments(state, extra.tensors),
        "model": extra.encode({**vars(model), "tensors": None}, "model"),
        "fit": trained.encode(_fit_values(state), "fit") if optimizer else None,
        "epochs": state.fit_state.epochs,
        "classes": None if state.classes is None else list(state.classes),
        "class_count": state.fit_state.class_count,
        "columns": dict(state.fit_state.columns or {}),
        "scaled_by": list(state.fit_state.scaled_by or ()),
        "history": extra.encode(_history_values(state.history), "history"),
    }
    tensors = {
        "model": model.tensors,
        "optimizer": trained.tensors,
        "extra": extra.tensors,
    }
    folder.write(content, {r: encode_tensors(t) for r, t in tensors.items() if t})


_CONTENT = {
    "arguments": Mapping[str, Any],
    "epochs": Natural,
    "classes": Sequence[str] | None,
    "class_count": Natural | None,
    "columns": Mapping[str, Sequence[str]],
    "scaled_by": Sequence[str],
}


def load(
    url: Any,
    names: Sequence[str],
    passed: Mapping[str, Any],
    trusted: Any = (),
    storage_options: Mapping[str, Any] | None = None,
) -> TrainerState:
    """Load a trainer with arguments of these names; see `Trainer.load`."""
    for name in passed:
        if name not in names:
            raise OptionError(
                f"Trainer has no argument {name!r}; pass any of {', '.join(names)}"
            )
    modules = trusted_modules(trusted)
    folder = SaveFolder(folder_store(url, storage_options), KIND, ROLES)
    content, tensors = folder.read()
    with restoring(folder.store.url):
        check({name: content[name] for name in _CONTENT}, _CONTENT)
        for name in content["arguments"]:
            if name not in names:
                raise SaveError(f"a trainer has no argument {name!r:.80}")
        return _decode(content, tensors, passed, modules)


def load_history(url: Any, storage_options: Mapping[str, Any] | None = None) -> History:
    """Load only the history of a saved trainer; needs none of its arguments.

    Raises:
        SaveError: If the save is missing, damaged, foreign or too new.
    """
    folder = SaveFolder(folder_store(url, storage_options), KIND, ROLES)
    content, tensors = folder.read()
    with restoring(folder.store.url):
        values = JsonValues(tensors.get("extra", {}))
        return _history_of(values.decode(content["history"]))


def _decode(
    content: Mapping[str, Json],
    tensors: Mapping[str, dict[str, Tensor]],
    passed: Mapping[str, Any],
    trusted: frozenset[str],
) -> TrainerState:
    values = ArgumentValues(tensors.get("extra", {}), KNOWN, trusted)
    arguments = _decode_arguments(content["arguments"], passed, values)
    extra = JsonValues(values.tensors)
    fields = extra.decode(content["model"])
    state = ModelState(**{**fields, "tensors": tensors.get("model", {})})
    try:
        model: Any = starting_model(arguments["model"], arguments.get("seed", 0))
    except FAILURES as error:
        kind = OptionError if "model" in passed else SaveError
        raise kind(f"model failed: {error}") from error
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must return a torch.nn.Module, got {model!r:.80}")
    state.load_into(model)
    optimizer = new_optimizer(arguments, model)
    trained = TrainedOptimizer.new(optimizer, scheduling_of(arguments), model)
    columns = {place: tuple(names) for place, names in content["columns"].items()}
    fit_state = FitState(
        trained,
        epochs=content["epochs"],
        class_count=content["class_count"],
        evaluating=evaluating_in(model),
        columns=columns,
        scaled_by=tuple(content["scaled_by"]),
    )
    if content["fit"] is not None:
        fit = JsonValues(tensors.get("optimizer", {})).decode(content["fit"])
        fit_state = _continued(fit_state, trained, fit, model)
    history = _history_of(extra.decode(content["history"]))
    return TrainerState(arguments, model, fit_state, history, content["classes"])


# ---- arguments


def _encode_arguments(state: TrainerState, tensors: dict[str, Tensor]) -> Json:
    """Encode each argument as ``{"value": ...}``, or ``{"missing": reason}``."""
    content: dict[str, Json] = {}
    for name in state.arguments:
        reasons = []
        for describe in _descriptions(name, state):
            values = ArgumentValues({}, KNOWN, None)
            try:
                encoded = values.encode(describe(), name)
                decoded = values.decode(encoded)
                if ArgumentValues({}, KNOWN).encode(decoded, name) != encoded:
                    raise OptionError(f"loading would return {decoded!r:.200} instead")
            except FAILURES as error:  # includes OptionError and SaveError
                reasons.append(str(error))
            else:
                content[name] = {"value": encoded}
                tensors.update(values.tensors)
                break
        else:
            content[name] = {"missing": ", and ".join(reasons)}
    return content


def _descriptions(name: str, state: TrainerState) -> Sequence[Callable[[], Any]]:
    """Return functions that may describe an argument by values and classes."""
    value, model = state.arguments[name], state.model
    if name == "model" and isinstance(model, KerasModule):
        return [lambda: model]
    if isinstance(value, torch.device):
        return [lambda: str(value)]
    if name == "callbacks":
        return [lambda: list(value)]
    descriptions = [lambda: value]
    if not isinstance(state.arguments["optimizer"], str):
        # The rate is saved with the function.
        lr = state.arguments.get("lr")
        if name == "optimizer":
            function = optimizer_function(value, lr)
            return [lambda: _optimizer_maker(state), lambda: function]
        if name == "lr":
            return [lambda: None]
    if name == "scheduler" and value is not None:
        descriptions.insert(0, lambda: _scheduler_maker(state))
    return descriptions


def _optimizer_maker(state: TrainerState) -> Any:
    """Describe a new optimizer by class and hyperparameters, if they recreate it."""
    optimizer = new_optimizer(state.arguments, state.model)
    parameters, kind = trainable(state.model), _torch_class(optimizer, torch.optim)
    defaults = {
        name: value
        for name, value in optimizer.defaults.items()
        if name in inspect.signature(kind).parameters
    }
    places = {id(parameter): i for i, parameter in enumerate(parameters)}
    groups = [[places[id(p)] for p in g["params"]] for g in optimizer.param_groups]
    maker: Any = functools.partial(kind, **defaults)
    if groups != [list(range(len(parameters)))]:
        maker = ParameterGroups(kind, defaults, hyperparameters(optimizer), groups)
    copy = maker(list(parameters))
    if copy.defaults != optimizer.defaults or (
        hyperparameters(copy) != hyperparameters(optimizer)
    ):
        raise OptionError(f"not all arguments of {kind.__name__} can be restored")
    return maker


def _scheduler_maker(state: TrainerState) -> Any:
    """Describe a new scheduler by its class and arguments, if they recreate it."""
    optimizer = new_optimizer(state.arguments, state.model)
    scheduler: Any = scheduling_of(state.arguments).of(optimizer)
    kind, arguments = _torch_class(scheduler, torch.optim.lr_scheduler), {}
    for name in inspect.signature(kind).parameters:
        if name == "min_lr" and hasattr(scheduler, "min_lrs"):
            same = len({*scheduler.min_lrs}) == 1
            arguments[name] = scheduler.min_lrs[0] if same else [*scheduler.min_lrs]
        elif name not in ("optimizer", "last_epoch", "verbose"):
            value = getattr(scheduler, name, inspect.Parameter.empty)
            if isinstance(value, Counter):
                value = list(value.elements())
            if value is not inspect.Parameter.empty:
                arguments[name] = value
    maker = functools.partial(kind, **arguments)
    optimizer_copy = new_optimizer(state.arguments, state.model)
    copy = maker(optimizer_copy)
    if copy.state_dict() != scheduler.state_dict() or (
        hyperparameters(optimizer_copy) != hyperparameters(optimizer)
    ):
        raise OptionError(f"not all arguments of {kind.__name__} can be restored")
    return maker


def _torch_class(value: Any, module: Any) -> Any:
    kind: Any = type(value)
    if kind not in vars(module).values():
        raise OptionError(f"it returns a {kind.__qualname__}, not a class of torch")
    return kind


def _decode_arguments(
    content: Mapping[str, Json], passed: Mapping[str, Any], values: ArgumentValues
) -> dict[str, Any]:
    """Decode the arguments that are not passed; OptionError names all missing ones."""
    arguments, missing = dict(passed), {}
    for name, saved in content.items():
        if name in passed:
            continue
        match saved:
            case {"missing": reason}:
                missing[name] = str(reason)
            case {"value": encoded}:
                try:
                    arguments[name] = values.decode(encoded)
                except UntrustedError as error:
                    missing[name] = str(error)
                except OptionError as error:
                    raise SaveError(f"{name}: {error}") from error
            case _:
                raise SaveError(f"{name} has the content {saved!r:.80}")
    if missing:
        reasons = "".join(f"\n- {name}: {why}" for name, why in missing.items())
        raise OptionError(
            f"pass {' and '.join(missing)} to Trainer.load, as the save cannot restore "
            f"{'it' if len(missing) == 1 else 'them'}:{reasons}"
        )
    return arguments


# ---- the model


@dataclass(frozen=True)
class ModelState:
    """The state of a module that a newly created module lacks."""

    tensors: Mapping[str, Tensor]  # the state dict, with only the first of tied tensors
    hidden: Mapping[str, Tensor]  # buffers that are not in the state dict
    ties: Mapping[str, str]  # from other names of tied tensors to those in `tensors`
    frozen: Sequence[str]  # names of parameters that are not trained
    evaluating: Sequence[str]  # paths of modules that stay in evaluation mode

    @classmethod
    def of(cls, module: nn.Module) -> "ModelState":
        """Describe a module; state other than tensors is an OptionError."""
        state_dict: dict[str, Any] = module.state_dict(keep_vars=True)
        first_names: dict[int, str] = {}
        ties = {}
        for name, value in state_dict.items():
            if not isinstance(value, Tensor):
                raise OptionError(
                    f"{name} of the model's state is a {type(value).__name__}; only "
                    "tensors can be saved"
                )
            if first_names.setdefault(id(value), name) != name:
                ties[name] = first_names[id(value)]
        return cls(
            {n: t.detach() for n, t in state_dict.items() if n not in ties},
            {n: b for n, b in module.named_buffers() if n not in state_dict},
            ties,
            [n for n, p in module.named_parameters() if not p.requires_grad],
            [n for n, m in module.named_modules() if not m.training],
        )

    def load_into(self, module: nn.Module) -> None:
        """Load this state into a new module; SaveError names a difference."""
        try:
            current = ModelState.of(module)
        except OptionError as error:
            raise SaveError(str(error)) from error
        saved, expected = self._layout(), current._layout()
        if different := differing_wrappers(saved, expected):
            raise SaveError(different)
        for name in {**expected, **saved}:
            theirs, ours = saved.get(name, "missing"), expected.get(name, "missing")
            if theirs != ours:
                raise SaveError(
                    f"{name} is {theirs} in the save, but {ours} in the model"
                )
        places = {}
        for name in self.hidden:
            path, _, leaf = name.rpartition(".")
            owner = dict(module.named_modules()).get(path)
            # `_buffers` is private in torch 2.7 to 2.13: `named_buffers` leaves
            # out buffers that are None, which a saved tensor may replace.
            if owner is None or leaf not in owner._buffers or name in current.tensors:
                raise SaveError(f"{name} is not a buffer of the model")
            places[name] = owner, leaf
        tied = {name: self.tensors[target] for name, target in self.ties.items()}
        try:
            module.load_state_dict({**self.tensors, **tied})
        except FAILURES as error:
            raise SaveError(f"the model cannot load its state: {error}") from error
        for name, (owner, leaf) in places.items():
            setattr(owner, leaf, self.hidden[name])
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(name not in self.frozen)
        for name, part in module.named_modules():
            part.training = name not in self.evaluating

    def _layout(self) -> dict[str, str]:
        tied = {name: f"tied to {target}" for name, target in self.ties.items()}
        return {n: described(tensor) for n, tensor in self.tensors.items()} | tied


# ---- state of the next fit


def new_optimizer(arguments: Mapping[str, Any], model: nn.Module) -> Optimizer:
    """Create a model's optimizer; OptionError if the argument does not return one."""
    function = optimizer_function(arguments["optimizer"], arguments.get("lr"))
    try:
        optimizer: Any = optimizer_of(function, model)
    except USER_ERRORS as error:
        raise OptionError(optimizer_failed(function, model, error)) from error
    if not isinstance(optimizer, Optimizer):
        raise OptionError(
            f"optimizer must return a torch.optim.Optimizer, got {optimizer!r}"
        )
    return optimizer


def scheduling_of(arguments: Mapping[str, Any]) -> Scheduling:
    """Return the scheduling that the arguments of a trainer ask for."""
    every = arguments.get("scheduler_every", "epoch")
    monitor = arguments.get("scheduler_monitor")
    return Scheduling(arguments.get("scheduler"), every, monitor)


# Of decoded values. The hyperparameters are those that the optimizer was made with.
_FIT = {
    "fingerprint": tuple[Mapping[str, str], str, str | None],
    "hyperparameters": Sequence[Mapping[str, Any]],
    "common": Mapping[str, Any],
    "per_replica": Mapping[str, Any],
}
_EXCHANGE = {"steps_made": Natural, "sent": Mapping[str, tuple[float, float]]}
_RESIDUAL = {"residual": Tensor, "grid": float}
_TRAINING_STATE = {
    "optimizer": Mapping[str, Any],
    "schedule": Mapping[str, Any] | None,
    "scaler": Mapping[str, Any],
}
_SCHEDULE = {"count": Natural, "before": Natural, "state": Mapping[str, Any]}


_fingerprint = functools.partial(Fingerprint.of, persistent_only=True)


def _fit_values(state: TrainerState) -> dict[str, Any]:
    """Return the state from which the next fit starts, as plain values."""
    fit, scheduling = state.fit_state, scheduling_of(state.arguments)
    trained = fit.optimizer
    if trained is None:
        raise OptionError("trainer has no optimizer_; fit it, or pass optimizer=False")
    scheduler = trained.rate.scheduler if trained.scheduling == scheduling else None
    fingerprint = _fingerprint(state.model, trained.optimizer, scheduler)
    optimizer = new_optimizer(state.arguments, state.model)
    _fingerprint(state.model, optimizer, scheduler).check(
        fingerprint,
        "the state after the last fit",
        "save with optimizer=False, or fit first",
    )
    start = replace(fit, carried=fit.carried_to(state.model)).start(scheduling)
    assert start is not None, "there is an optimizer"
    return {
        "fingerprint": list(fingerprint),
        "hyperparameters": trained.initial,
        "common": start.common,
        "per_replica": start.per_replica,
    }


def _continued(
    state: FitState, trained: TrainedOptimizer, fit: Any, model: nn.Module
) -> FitState:
    """Add the result of `_fit_values` to the state of a new trainer."""
    check({name: fit[name] for name in _FIT}, _FIT)
    optimizer, rate = trained.optimizer, trained.rate
    _fingerprint(model, optimizer, rate.scheduler).check(
        Fingerprint(*fit["fingerprint"]),
        "the save",
        "to train with another one, create a new Trainer from the loaded model_",
    )
    exchange, training_state = fit["common"]["exchange"], fit["per_replica"]
    check({name: exchange[name] for name in _EXCHANGE}, _EXCHANGE)
    check({name: training_state[name] for name in _TRAINING_STATE}, _TRAINING_STATE)
    try:
        optimizer.load_state_dict(training_state["optimizer"])
    except USER_ERRORS as error:
        raise SaveError(f"the optimizer cannot load its state: {error}") from error
    schedule = training_state["schedule"]
    if schedule is not None:
        check({name: schedule[name] for name in _SCHEDULE}, _SCHEDULE)
        saved = schedule["state"]
        methods = [n for n in saved if callable(getattr(rate.scheduler, n, None))]
        if methods:
            raise SaveError(f"the scheduler's state would replace methods: {methods}")
        try:
            rate.restore_(schedule)
        except USER_ERRORS as error:
            raise SaveError(f"the scheduler cannot load its state: {error}") from error
    sent = exchange["sent"]
    if not all(0 < threshold < math.inf for threshold, _ in sent.values()):
        raise SaveError(f"thresholds must be > 0 and finite, got {sent!r:.200}")
    if "residual" in exchange:
        check({name: exchange[name] for name in _RESIDUAL}, _RESIDUAL)
        counts, grid = exchange["residual"], exchange["grid"]
        size = sum(p.numel() for p in trainable(model))
        if described(counts) != f"int32 ({size},)" or not 0 < grid < math.inf:
            raise SaveError(
                f"the residual must be int32 ({size},), in steps > 0, got "
                f"{described(counts)}, in steps of {grid}"
            )
    trained = trained._replace(initial=list(fit["hyperparameters"]))
    checksum = checksum_of(model)
    return replace(state, optimizer=trained, carried=exchange, checksum=checksum)


# ---- history

_HISTORY = {
    "rows": Sequence[Mapping[str, Any]],
    "stopping": Mapping[str, Any] | None,
    "steps": Tensor,
    "step_columns": Sequence[tuple[str, str]],
    "timeline": Tensor,
    "span_columns": Sequence[tuple[str, str]],
    "run": Mapping[str, Any],
    "layers": Tensor,
    "layer_columns": Sequence[tuple[str, str]],
    "layer_names": Sequence[str],
}
_RUN = {
    "began": float,
    "seconds": float,
    "options": Mapping[str, str],
    "versions": Mapping[str, str],
    "replicas": Mapping[int, Mapping[str, Any]],
    "error": str,
    "name": str,
    "id": str,
}


def _history_values(history: History) -> dict[str, Any]:
    return {
        "rows": [dict(row) for row in history],
        "stopping": history.stopping and vars(history.stopping),
        "steps": np.frombuffer(history.steps.packed(), np.uint8),
        "step_columns": layout_of(StepRow).descr,
        "timeline": np.frombuffer(history.timeline.packed(), np.uint8),
        "span_columns": SPANS.descr,
        "run": vars(history.run),
        "layers": np.frombuffer(history.layers.packed(), np.uint8),
        "layer_columns": layout_of(LayerRow).descr,
        "layer_names": history.layers.names,
    }


def _history_of(values: Any) -> History:
    check({name: values[name] for name in _HISTORY}, _HISTORY)
    check(values["run"], _RUN)
    history = History(values["rows"])
    if values["stopping"] is not None:
        history.stopping = Stopping(**values["stopping"])
    history.run = RunRecord(**values["run"])
    history.timeline = Timeline(history.run.began)
    packed, layout = _packed(values, "steps", "step_columns", layout_of(StepRow))
    history.steps.extend(unpack_rows(packed, StepRow, layout))
    history.layers = LayerTable(values["layer_names"])
    packed, layout = _packed(values, "layers", "layer_columns", layout_of(LayerRow))
    history.layers.extend(unpack_rows(packed, LayerRow, layout))
    history.timeline.extend(*_packed(values, "timeline", "span_columns", SPANS))
    return history


def _packed(
    values: Any, name: str, columns_name: str, current: np.dtype[Any]
) -> tuple[bytes, np.dtype[Any]]:
    """Return packed rows and their layout, perhaps of another release."""
    columns = [(column, kind) for column, kind in values[columns_name]]
    if not {kind for _, kind in columns} <= {column[1] for column in current.descr}:
        raise SaveError(f"the columns of {name} have unknown types: {columns!r:.80}")
    return values[name].numpy().tobytes(), np.dtype(columns)
