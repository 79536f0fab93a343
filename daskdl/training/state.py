"""The state of a replica, in the form that checkpoints and messages contain.

A replica starts from such a state when it joins a run, when it resumes a checkpoint,
after the loss of all replicas, and in a later fit of a trainer. A state consists of
plain values and tensors, which are not copied until they are encoded.
"""

import contextlib
import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from daskdl.channel.protocol import Arrays
from daskdl.data.unreadable import USER_ERRORS
from daskdl.errors import CodecError, DaskDLError, OptionError, SaveError
from daskdl.saving.folder import check_tensor, decode_tensors, encode_tensors
from daskdl.saving.json_values import Json, JsonValues
from daskdl.serialization import Packed

# Kinds of exchange states.
# UNSHARED: without a state of an exchange, so that any master resumes it.
UNSHARED, SHARING, AVERAGING = "alone", "gradient_sharing", "parameter_averaging"
MODEL = "model"  # kind of an exchange whose only state is the model
PARAMETERS = "parameters"  # key of unquantized parameters in a common state

State = Mapping[str, Any]  # plain values, and tensors, not copied


class ExchangeState(NamedTuple):
    """State of an exchange."""

    common: State  # equal on all replicas at a sync point
    per_replica: State  # of this replica alone


class ReplicaState(NamedTuple):
    """State of a replica.

    Attributes:
        header: Plain values that can be read without the tensors.
        common: Equal on all replicas at a sync point.
        per_replica: Of this replica alone. Its optimizer, schedule and loss scaler also
            serve a replica that has no state of its own.
    """

    header: State
    common: State
    per_replica: State


@dataclass(frozen=True)
class PickledValues(JsonValues):
    """Values for another process of the same fit: what is not plain is pickled.

    Example:
        >>> values = PickledValues()
        >>> values.decode(values.encode({"dtype", "shape"}, "names")) == {
        ...     "dtype",
        ...     "shape",
        ... }
        True
    """

    @override
    def encode(self, value: Any, name: str, depth: int = 0) -> Json:
        if isinstance(value, Tensor):
            try:
                check_tensor(name, value)
            except OptionError:
                return self._encode_other(value, name, depth)
        return super().encode(value, name, depth)

    @override
    def _encode_other(self, value: Any, name: str, depth: int) -> Json:
        return {"pickled": self.encode(Packed(value, name).payload, name, depth)}

    @override
    def _decode_tagged(self, tag: str, inner: Json, depth: int) -> Any:
        if tag != "pickled":
            return super()._decode_tagged(tag, inner, depth)
        payload: Tensor = self.decode(inner, depth)
        packed: Packed[Any] = Packed.of(payload.numpy(), "state")
        return packed.unpack()


def copied_state(state: State) -> State:
    """Copy a state; its tensors come to the CPU."""

    def copy_of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to("cpu", copy=True)
        if type(value) is dict:
            return {name: copy_of(item) for name, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(copy_of, value))
        return copy.deepcopy(value)

    return {name: copy_of(value) for name, value in state.items()}


VALUES, TENSORS = "values", "tensors"  # names of the arrays of an encoded state


def encoded(state: ReplicaState) -> Arrays:
    """Copy a state into arrays for another process.

    Example:
        >>> state = ReplicaState({"epoch": 3}, {"weight": torch.ones(2)}, {})
        >>> decoded(encoded(state)).common
        {'weight': tensor([1., 1.])}
    """
    values = PickledValues()
    content = values.encode([dict(part) for part in state], "state")
    text = json.dumps(content).encode()
    tensors = encode_tensors(values.tensors)
    return {VALUES: np.frombuffer(text, np.uint8), TENSORS: tensors.numpy()}


def decoded(arrays: Mapping[str, Any]) -> ReplicaState:
    """Read the result of `encoded`; other entries are ignored."""
    values = PickledValues(decode_tensors(arrays[TENSORS].tobytes()))
    return ReplicaState(*values.decode(json.loads(arrays[VALUES].tobytes())))


class LoadedPart(NamedTuple):
    """Part of a state that was read."""

    values: State
    at: str  # where it was read, for messages


class StartState(NamedTuple):
    """The state from which a replica starts.

    Attributes:
        kind: Kind of the exchange that the state is of.
        common: The common part.
        donor: Part with an optimizer; the first of `parts`, if any.
        parts: Parts of the replicas that this replica continues for.
    """

    kind: str
    common: LoadedPart
    donor: LoadedPart
    parts: Sequence[LoadedPart] = ()

    @classmethod
    def of(cls, state: ReplicaState, at: str) -> Self:
        """Start from the state of another replica, an earlier fit or a lost run."""
        common, donor = LoadedPart(state.common, at), LoadedPart(state.per_replica, at)
        return cls(state.header["kind"], common, donor)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the module, by name."""
        common = self.common.values
        parameters = common["exchange"].get(PARAMETERS, {})
        return {**common.get("tensors", {}), **parameters}

    @property
    def optimizer(self) -> LoadedPart | None:
        """State dict of the optimizer; None: a new optimizer has to begin."""
        for values, at in (self.common, self.donor):
            if "optimizer" in values:
                return LoadedPart(values["optimizer"], at)
        return None

    def check(self, common: State, per_replica: State) -> None:
        """Check the parts against a state of the same form, see `check_like`."""
        check_like(common, self.common.values, f"{self.common.at}: its state")
        for part in (*self.parts, self.donor):
            check_like(per_replica, part.values, f"{part.at}: its state")
        if self.optimizer is None:
            where = f"{self.common.at}, {self.donor.at}"
            raise SaveError(f"{where}: optimizer is missing")


@contextlib.contextmanager
def restoring(what: str) -> Iterator[None]:
    """Context manager: report errors from wrong values as a damaged checkpoint."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except USER_ERRORS as error:
        if isinstance(error, SaveError):
            raise SaveError(f"{what}: {error}") from error
        if isinstance(error, DaskDLError) and not isinstance(error, CodecError):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise SaveError(f"{what} is damaged: {reason}") from error


def check_like(expected: Any, value: Any, what: str, *, loose: bool = False) -> None:
    """Check that a state read from a checkpoint has the same form as the current state.

    Types, fields, lengths and shapes are compared; values are not. None in `expected`
    matches anything.

    Args:
        expected: Current state.
        value: State that was read; may have additional fields.
        what: Name of the state in messages.
        loose: For states of classes from other libraries or the user: lists and tensors
            may have any length, None in `value` matches any scalar, private fields may
            be missing, and private lists are not compared.
    """
    if isinstance(expected, Tensor):
        fits = isinstance(value, Tensor) and (loose or value.shape == expected.shape)
        _check(fits, expected, value, what)
    elif isinstance(expected, Mapping):
        _check(isinstance(value, Mapping), expected, value, what)
        for name in filter(lambda name: isinstance(name, str), expected):
            private = loose and name.startswith("_")
            if name not in value and not private:
                raise SaveError(f"{what}.{name} is missing")
            if name in value and not (private and isinstance(expected[name], list)):
                check_like(expected[name], value[name], f"{what}.{name}", loose=loose)
    elif isinstance(expected, list | tuple):
        fits = isinstance(value, list | tuple)
        _check(fits and (loose or len(value) == len(expected)), expected, value, what)
        for i, (ours, theirs) in enumerate(zip(expected, value, strict=not loose)):
            check_like(ours, theirs, f"{what}[{i}]", loose=loose)
    elif expected is not None and not (loose and value is None):
        kinds = (int, float) if isinstance(expected, int | float) else (type(expected),)
        fits = isinstance(value, kinds) and isinstance(value, bool) <= isinstance(
            expected, bool | float
        )
        _check(fits, expected, value, what)


def _check(fits: bool, expected: Any, value: Any, what: str) -> None:
    if not fits:
        raise SaveError(
            f"{what} is damaged: it is {_kind(value)}, not {_kind(expected)}"
        )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    return f"a {type(value).__name__}{size}"


def described(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape as text.

    Example:
        >>> described(torch.zeros(2, 3))
        'float32 (2, 3)'
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(tensor.shape)}"


# Names of classes and tensors, in saved states and now.


def class_name(value: object) -> str:
    """Name the class of a value with its module: libraries repeat each other's names.

    Example:
        >>> class_name(torch.nn.Linear(1, 1))
        'torch.nn.modules.linear.Linear'
    """
    return f"{type(value).__module__}.{type(value).__qualname__}"


def is_same_class(name: str, saved: str) -> bool:
    """Compare results of `class_name`; a script, `__main__`, is a module elsewhere.

    Example:
        >>> is_same_class("__main__.Own", "train.Own"), is_same_class("a.Own", "b.Own")
        (True, False)
    """
    if "__main__" in (name.partition(".")[0], saved.partition(".")[0]):
        return name.rpartition(".")[2] == saved.rpartition(".")[2]
    return name == saved


# Attributes in which wrappers of modules keep the module.
WRAPPERS = {"_orig_mod": "torch.compile", "module": "torch.nn.DataParallel"}


def differing_wrappers(saved: Iterable[str], here: Iterable[str]) -> str:
    """Explain why names of tensors differ, if only wrappers of modules differ; else "".

    Example:
        >>> print(differing_wrappers(["_orig_mod.0.weight"], ["0.weight"]))
        the saved model is wrapped in torch.compile, and this one is not wrapped: \
'_orig_mod.0.weight' there is '0.weight' here; pass the model as it was saved, wrapped \
in torch.compile
        >>> differing_wrappers(["weight"], ["bias"])
        ''
    """

    def by_plain_name(names: Iterable[str]) -> dict[str, str]:
        return {
            ".".join(part for part in name.split(".") if part not in WRAPPERS): name
            for name in names
        }

    def state(name: str) -> str:
        wrappers = [WRAPPERS[part] for part in name.split(".") if part in WRAPPERS]
        return f"wrapped in {' and '.join(wrappers)}" if wrappers else "not wrapped"

    theirs, ours = by_plain_name(saved), by_plain_name(here)
    if theirs.keys() != ours.keys() or theirs == ours:
        return ""
    plain, name = next(item for item in theirs.items() if item not in ours.items())
    return (
        f"the saved model is {state(name)}, and this one is {state(ours[plain])}: "
        f"{name!r} there is {ours[plain]!r} here; pass the model as it was saved, "
        f"{state(name)}"
    )
