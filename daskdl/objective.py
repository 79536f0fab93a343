"""Calls of a model, and the training objective: a loss, or the user's own step.

This module decides how ``forward`` receives several inputs, and which of its outputs a
loss receives. Code that runs a model on labelled rows accepts either objective.
"""

import functools
import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from daskdl.errors import ModelError, OptionError

Loss = Callable[[Any, Any], Tensor]  # (output of the model, labels) -> scalar
Batch = tuple[Any, Any]  # (x, y): tensors, or tuples and dicts of tensors
Logs = Mapping[str, Any]  # what a step logs: numbers and tensors of one element


@dataclass(frozen=True)
class OwnStep:
    """A user's step, for models whose forward pass is not ``model(x)``."""

    # Maps the model and a batch (x, y) to what `loss_and_logs` takes.
    function: Callable[[nn.Module, Batch], Any]


class ModelLoss(OwnStep):
    """The loss that a model returns with its output, like transformers' models."""


Objective = Loss | OwnStep


def objective_of(loss: Any, step: Any) -> Objective:
    """Return the objective for a trainer's `loss` and `step`.

    A loss is returned unchecked. Without loss and step, the model returns the loss.
    """
    if loss is not None and step is not None:
        raise OptionError(
            f"loss must be None with step=, which computes the loss, got {loss!r}"
        )
    if step is None:
        objective: Objective = ModelLoss(_loss_alone) if loss is None else loss
        return objective
    if not callable(step):
        raise OptionError(
            "step must be a function of (model, (x, y)) that returns the batch's mean "
            f"loss, got {step!r}"
        )
    return OwnStep(step)


def loss_and_logs(returned: Any) -> tuple[Any, Logs]:
    """Split the result of a step: the loss, ``(loss, logs)``, or a dict with "loss".

    If the result is an object with a ``loss``, like that of transformers' models, its
    other attributes are ignored.

    Raises:
        ModelError: If a dict has no "loss", or a log is not one number.
    """
    if isinstance(returned, Tensor):  # nearly always, and in every step
        return returned, {}
    if hasattr(returned, "loss"):
        return returned.loss, {}
    logs: dict[str, Any] = {}
    if isinstance(returned, Mapping):
        logs = dict(returned)
        if "loss" not in logs:
            raise ModelError(
                f"step must return a dict with 'loss', got the keys {list(logs)}; or "
                "return the loss alone, or (loss, logs)"
            )
        returned = logs.pop("loss")
    match returned:
        case tuple((loss, Mapping() as returned_logs)):
            returned, logs = loss, dict(returned_logs)
    for name, value in logs.items():
        single = isinstance(value, Tensor) and value.numel() == 1
        if not single and not isinstance(value, Real):
            shown = (
                f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
            )
            raise ModelError(
                f"step must log numbers or tensors of one element, got {name!r}: "
                f"{shown}; return its mean(), or return (loss, logs) with logs that "
                "leave it out"
            )
    return returned, logs


def batch_loss_and_logs(
    objective: Objective, module: nn.Module, batch: Batch
) -> tuple[Any, Logs]:
    """Run a model on a batch; return the loss and what a step logs."""
    if isinstance(objective, OwnStep):
        return loss_and_logs(objective.function(module, batch))
    x, y = batch
    return objective(scored(call(module, x)), y), {}


def scored(output: Any) -> Any:
    """Return the output that a loss and metrics receive.

    If the output is an object with ``logits``, like that of transformers' models, these
    are the ``logits``. Tensors, tuples and plain dicts are returned unchanged.

    Example:
        >>> class Output(dict):
        ...     logits = torch.tensor([0.5])
        >>> scored(Output()), scored({"logits": 1})
        (tensor([0.5000]), {'logits': 1})
    """
    if isinstance(output, Tensor | tuple) or type(output) is dict:
        return output
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else output


def picked(output: Any, which: str | int | None) -> Any:
    """Return one of a model's outputs by name or position; all if `which` is None.

    Raises:
        OptionError: If there is no such output.
    """
    if which is None:
        return output
    if isinstance(output, Mapping):
        outputs = dict(output)
    elif isinstance(output, tuple):
        names = getattr(output, "_fields", range(len(output)))
        outputs = dict(zip(names, output, strict=True))
    else:
        outputs = getattr(output, "__dict__", {})
    values = list(outputs.values())
    if which in outputs:
        return outputs[which]
    if not isinstance(which, str) and -len(values) <= which < len(values):
        return values[which]
    if not outputs:
        raise OptionError(
            f"output={which!r} selects one of several outputs, but the model returns a "
            f"single {type(output).__name__}: leave output out"
        )
    raise OptionError(
        f"output={which!r} is not among the model's outputs, "
        f"{', '.join(map(repr, outputs))}"
    )


class OneOutput(nn.Module):
    """A model that returns only one of its outputs, see `picked`."""

    def __init__(self, model: nn.Module, which: str | int) -> None:
        super().__init__()
        self.model = model
        self.which = which

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output."""
        return picked(self.model(*args, **kwargs), self.which)


def batch_loss(objective: Objective, module: nn.Module, batch: Batch) -> Tensor:
    """Run a model on a batch and return the loss."""
    loss: Tensor = batch_loss_and_logs(objective, module, batch)[0]
    return loss


def model_loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Any, Any]:
    """Run a model that returns its loss.

    Args:
        module: Returns an object or a dict with ``loss``, a scalar.
        batch: x, and y or None. If y is given, the model gets it as ``labels``.

    Returns:
        The loss, the output for metrics, and the labels: y, or ``x["labels"]``.

    Raises:
        ModelError: If the output has no loss.
    """
    x, y = batch
    labels_in_x = x.get("labels") if isinstance(x, Mapping) else None
    labels = labels_in_x if y is None else y
    labels_argument: dict[str, Any] = {}
    if y is not None and labels_in_x is not None:
        raise ModelError(
            "labels are passed both as y and as X['labels']; leave one of them out"
        )
    if y is None and isinstance(labels_in_x, Tensor) and labels_in_x.dtype in _INTEGERS:
        labels = labels_in_x.long()  # class indices, converted like y in `to_device`
        x = {**x, "labels": labels}
    elif y is not None:
        x, labels_argument = _labelled(module, x, y)
    output = call(module, x, **labels_argument)
    fields = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    loss = fields.get("loss")
    if loss is None:
        shown = f" with {', '.join(map(repr, fields))}" if fields else ""
        raise ModelError(
            f"{_NO_LOSS}, but {type(module).__name__} returned a "
            f"{type(output).__name__}{shown}, without 'loss'; transformers' models "
            "compute it from labels, passed as y or X['labels']"
        )
    return loss, fields.get("logits", output), labels


def _labelled(module: nn.Module, x: Any, y: Any) -> tuple[Any, dict[str, Any]]:
    """Return x with y as ``labels``, or x and y as a keyword argument."""
    signature, named = _signature(module), isinstance(x, Mapping)
    merged = {**x, "labels": y} if named else {}
    if signature is not None and _unknown(signature, {"labels": y}):
        if named and way_of(module, x) == "one":
            return merged, {}
        raise ModelError(f"{_NO_LOSS} from y, its 'labels', but {takes(module)}")
    if named and way_of(module, merged) == "keywords":
        return merged, {}
    return x, {"labels": y}


def _loss_alone(module: nn.Module, batch: Batch) -> Tensor:
    return model_loss(module, batch)[0]


_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.uint8)
_NO_LOSS = (
    "pass loss=, such as torch.nn.CrossEntropyLoss(), or step=; without both, the "
    "model must compute its own loss"
)


class Penalized(ABC):
    """A module that adds a penalty to the loss, such as weight decay."""

    @abstractmethod
    def penalty(self) -> Tensor | None:
        """Return the penalty after a forward pass, independent of the rows, or None."""


def on_device(objective: Objective, device: torch.device) -> Objective:
    """Move the objective's tensors, such as class weights; change modules in place."""
    holder = objective.function if isinstance(objective, OwnStep) else objective
    if isinstance(holder, nn.Module):
        holder.to(device)
    return objective


def is_sum(objective: Objective) -> bool:
    """Whether an objective sums over the rows of a batch; otherwise it is a mean."""
    if isinstance(objective, functools.partial) and "reduction" in objective.keywords:
        return bool(objective.keywords["reduction"] == "sum")
    return getattr(objective, "reduction", "mean") == "sum"


# ---- calls of a model

_EMPTY = inspect.Parameter.empty
Way = Literal["one", "keywords", "positions"]
_signatures: WeakKeyDictionary[nn.Module, inspect.Signature | None]
_signatures = WeakKeyDictionary()
# By model, and by the keys of a dict or the length of a tuple.
_ways: WeakKeyDictionary[nn.Module, dict[Any, Way]] = WeakKeyDictionary()


def call(module: nn.Module, x: Any, **arguments: Any) -> Any:
    """Run a model on x.

    A dict is passed by keyword if ``forward`` accepts all its keys, and names one of
    them or does not accept a single argument. A tuple is passed by position if
    ``forward`` takes several arguments and accepts that many. Anything else is passed
    as one argument. A named tuple may be passed in any of these ways. The choice is
    made once for each model and structure. If ``forward`` accepts any arguments, like a
    module of `torch.compile`, the signature of the wrapped module decides.

    Raises:
        ModelError: If ``forward`` accepts some keys of a dict but not all, or takes
            several arguments but not as many as the tuple has.

    Example:
        >>> x = torch.ones(1, 2)
        >>> call(nn.PairwiseDistance(), {"x1": x, "x2": x + 1})
        tensor([1.4142])
        >>> call(nn.PairwiseDistance(), (x, x + 1))
        tensor([1.4142])
    """
    way = way_of(module, x)
    if way == "keywords":
        return module(**_fields(x), **arguments)
    return module(*(x if way == "positions" else (x,)), **arguments)


def way_of(module: nn.Module, x: Any) -> Way:
    """Return how `call` passes x."""
    if isinstance(x, Tensor) or not isinstance(x, Mapping | tuple):
        return "one"
    ways = _ways.setdefault(module, {})
    structure = len(x) if type(x) is tuple else tuple(_fields(x))
    if structure not in ways:
        ways[structure] = _way(module, x)
    return ways[structure]


def _fields(x: Any) -> Mapping[Any, Any]:
    """Return a dict, or the fields of a named tuple, by name."""
    return x if isinstance(x, Mapping) else x._asdict()


def _way(module: nn.Module, x: Any) -> Way:
    """Return how a dict or a tuple is passed."""
    signature = _signature(module)
    if signature is None:
        return "one"
    if type(x) is not tuple:
        fields = _fields(x)
        taken = [name for name in fields if name in _keyword_names(signature)]
        unknown = _unknown(signature, fields)
        alone = _binds(signature, None)
        if (taken or not alone) and not unknown and _binds(signature, **fields):
            return "keywords"
        if isinstance(x, Mapping):
            # {"ids": ..., "mask": ...} may be the batch of forward(batch, mask=None),
            # and {"x": ..., "size": ...} the x of forward(x).
            names = list(signature.parameters)
            if taken and not (alone and (names[0] not in fields or not names[1:])):
                wrong = [f"{key!r} is none of them" for key in unknown]
                wrong += [
                    f"{name!r} is missing"
                    for name, parameter in signature.parameters.items()
                    if parameter.default is _EMPTY
                    and name in _keyword_names(signature)
                    and name not in fields
                ]
                raise ModelError(
                    f"{takes(module)}, but X has {', '.join(map(repr, fields))}: "
                    f"{', '.join(wrong)}; rename the keys of X to these arguments, and "
                    "leave the others out"
                )
            return "one"
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    positional = kinds.count(inspect.Parameter.POSITIONAL_ONLY)
    positional += kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if positional > 1 or inspect.Parameter.VAR_POSITIONAL in kinds:
        if _binds(signature, *x):
            return "positions"
        if not _binds(signature, None):
            raise ModelError(
                f"{takes(module)}, but X is a tuple of {len(x)}; pass one value for "
                "each argument, or a dict with these keys"
            )
    return "one"


def takes(module: nn.Module) -> str:
    """Describe the arguments of ``forward``, for messages."""
    signature = _signature(module)
    names = ["anything"]
    if signature is not None:
        inputs = signature.parameters.values()
        names = [
            f"*{parameter.name}"
            if parameter.kind is parameter.VAR_POSITIONAL
            else repr(parameter.name)
            for parameter in inputs
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
    return f"forward of {type(module).__name__} takes {', '.join(names)}"


def _signature(module: nn.Module) -> inspect.Signature | None:
    """Return the signature of ``forward``; None if unknown."""
    if module not in _signatures:
        _signatures[module] = _inspected(module)
    return _signatures[module]


def _inspected(module: nn.Module) -> inspect.Signature | None:
    forward: Any = module.forward
    schema = getattr(forward, "schema", None)  # of a ScriptModule
    if schema is not None:
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        return inspect.Signature(
            [
                inspect.Parameter(
                    argument.name,
                    kinds[argument.kwarg_only],
                    default=None if argument.has_default_value() else _EMPTY,
                )
                for argument in schema.arguments[1:]
            ]
        )
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):  # written in C
        return None
    anything = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    inner = list(module.children())
    kinds_given = tuple(p.kind for p in signature.parameters.values())
    if kinds_given == anything and len(inner) == 1:
        return _signature(inner[0])
    return signature


def _keyword_names(signature: inspect.Signature) -> list[str]:
    """Return the named arguments that can be passed by keyword."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return [n for n, p in signature.parameters.items() if p.kind in kinds]


def _binds(signature: inspect.Signature, *values: Any, **named: Any) -> bool:
    try:
        signature.bind(*values, **named)
    except TypeError:
        return False
    return True


def _unknown(signature: inspect.Signature, fields: Mapping[Any, Any]) -> list[Any]:
    """Return the keys that no argument accepts."""
    known: set[Any] = set(_keyword_names(signature))
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            # transformers write **kwargs: Unpack[Options], with the keys of Options.
            options = typing.get_args(parameter.annotation)[:1]
            if not any(map(typing.is_typeddict, options)):
                return [key for key in fields if not isinstance(key, str)]
            known |= {name for option in options for name in option.__annotations__}
    return [key for key in fields if key not in known]
