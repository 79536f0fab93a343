"""Models, losses and optimizers as bytes, for the way through Dask.

Dask serialises a module attribute by attribute, which unties tied weights, and it
cannot serialise every tensor. So they travel as the bytes of ``torch.save`` with
cloudpickle: a storage is written once however many tensors look at it, lambdas and
classes of a notebook are included, and what was on an accelerator arrives on the CPU.
Modules with parametrizations, which torch does not pickle, travel too.
"""

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar

import cloudpickle
import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize
from typing_extensions import override

from daskdl.errors import ModelError

T = TypeVar("T")

# What pickling something unpicklable raises, depending on who notices first.
_PICKLING_ERRORS = (
    pickle.PicklingError,
    TypeError,
    AttributeError,
    ValueError,
    RuntimeError,
    NotImplementedError,
)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Of cloudpickle, for modules with parametrizations too.

    Torch gives each of these a class of its own, which cannot be pickled. What travels
    is the module of the class before, and it gets such a class again on arrival.
    """

    @override
    def reducer_override(self, obj: Any) -> Any:
        """How an object is pickled, where it is not in the ordinary way."""
        if not isinstance(obj, nn.Module) or not parametrize.is_parametrized(obj):
            return super().reducer_override(obj)
        kind = parametrize.type_before_parametrizations(obj)
        # Before Python 3.11 a class has none unless it defines one.
        state: Callable[[Any], Any] = getattr(kind, "__getstate__", vars)
        return _bare, (kind,), state(obj), None, None, _parametrize_


def _bare(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _parametrize_(module: nn.Module, state: dict[str, Any]) -> None:
    module.__setstate__(state)  # type: ignore[no-untyped-call]
    # As torch registers a parametrization, without computing its inverse once more.
    parametrize._inject_new_class(module)
    assert isinstance(module.parametrizations, nn.ModuleDict)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)


class _Pickling:
    """What `torch.save` takes for a module like `pickle`."""

    Pickler = Pickler


class Packed(Generic[T]):
    """A value as bytes; pickles and travels as these bytes only.

    Args:
        content: What to pack; read only, may be anything that cloudpickle can write.
        argument: Its name in the user's call, for messages.

    Raises:
        ModelError: If it cannot be pickled; the message names the attribute.

    Example:
        >>> packed = Packed(lambda x: x + 1, "loss")
        >>> packed.unpack()(1)
        2
    """

    argument: str
    payload: np.ndarray  # uint8: an array crosses Dask without being copied
    _content: T | None
    _lock: threading.Lock

    def __init__(self, content: T, argument: str) -> None:
        self.argument = argument
        self.payload = np.frombuffer(_packed(content, argument), np.uint8)
        self._forget()

    @classmethod
    def of(cls, payload: np.ndarray, argument: str) -> Self:
        """A value that came as the bytes of another pack."""
        packed = cls.__new__(cls)
        packed.__setstate__({"argument": argument, "payload": payload})
        return packed

    def unpack(self) -> T:
        """Return a new copy at each call, the caller's own, on the CPU.

        Raises:
            ModelError: If a module it needs is missing in this process.
        """
        try:
            content: T = torch.load(
                io.BytesIO(self.payload.data), map_location="cpu", weights_only=False
            )
        except (ImportError, AttributeError) as error:
            raise ModelError(
                f"{self.argument} cannot be unpacked here: {error}; every worker "
                "needs the modules it was written in: install them there, use "
                "client.upload_file, or cloudpickle.register_pickle_by_value"
            ) from error
        return content

    def shared(self, prepare: Callable[[T], T] | None = None) -> T:
        """Return the one copy of this process; unpacked at the first call.

        Threads share it, so nobody may change it. What should be trained is had
        from :meth:`unpack`.

        Args:
            prepare: What to do with the copy before anybody sees it. Only the first
                call's is used.
        """
        with self._lock:
            if self._content is None:
                content = self.unpack()
                self._content = content if prepare is None else prepare(content)
            return self._content

    def opened(self, prepare: Callable[[T], T] | None = None) -> T:
        """As `shared`, and let go of the bytes: of what travels no further.

        So there is one copy of a model, where it came packed in something else that
        travels.
        """
        content = self.shared(prepare)
        with self._lock:
            self.payload = self.payload[:0].copy()
        return content

    def _forget(self) -> None:
        self._content = None
        self._lock = threading.Lock()

    @override
    def __sizeof__(self) -> int:
        """What Dask counts a copy of it as."""
        return object.__sizeof__(self) + self.payload.nbytes

    def __getstate__(self) -> dict[str, Any]:
        if not self.payload.nbytes:
            raise pickle.PicklingError(f"{self.argument} was opened, to stay here")
        return {"argument": self.argument, "payload": self.payload}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.argument}, {self.payload.nbytes} bytes)"


class PackedModel(Packed[nn.Module]):
    """A module as bytes.

    Example:
        >>> packed = PackedModel(nn.Linear(2, 1))
        >>> packed.module()
        Linear(in_features=2, out_features=1, bias=True)
        >>> packed.module() is packed.module()
        True
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, "model")

    _of_thread: threading.local

    def module(
        self, prepare: Callable[[nn.Module], nn.Module] | None = None
    ) -> nn.Module:
        """Return this thread's module, whose tensors all threads of the process share.

        Many a forward pass puts something into an attribute and reads it later: threads
        that shared one module would read each other's.

        Args:
            prepare: See `shared`.
        """
        module: nn.Module | None = getattr(self._of_thread, "module", None)
        if module is None:
            module = self._of_thread.module = _with_same_tensors(self.shared(prepare))
        return module

    @override
    def _forget(self) -> None:
        super()._forget()
        self._of_thread = threading.local()


def _with_same_tensors(module: nn.Module) -> nn.Module:
    """A copy that takes no memory for parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def _packed(content: Any, argument: str) -> bytes:
    buffer = io.BytesIO()
    try:
        # Protocol 5: cloudpickle writes nested classes only from protocol 4 on.
        torch.save(content, buffer, pickle_module=_Pickling, pickle_protocol=5)
    except _PICKLING_ERRORS as error:
        found = next(_unpicklable(content, argument), None)
        blamed = argument if found is None else found
        raise ModelError(
            f"{argument} cannot be sent to the workers, because {blamed} cannot be "
            f"pickled: {error}; create it when it is first used, or leave it out in "
            "__getstate__"
        ) from error
    return buffer.getvalue()


def _unpicklable(
    value: Any, path: str, seen: frozenset[int] = frozenset()
) -> Iterator[str]:
    """The innermost attributes that cannot be pickled, as paths with their types."""
    seen |= {id(value)}  # two objects that know each other would go round for ever
    for step, part in _parts(value):
        if id(part) not in seen and not _can_be_pickled(part):
            kind = type(part)
            inner = next(_unpicklable(part, path + step, seen), None)
            yield inner or f"{path}{step} (a {kind.__module__}.{kind.__qualname__})"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        # As the user writes them: submodules are attributes, not dictionary items.
        for name, child in value.named_children():
            yield f".{name}", child
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif not isinstance(value, type):
        for name, part in getattr(value, "__dict__", {}).items():
            if name != "_modules":
                yield f".{name}", part


def _can_be_pickled(value: Any) -> bool:
    try:
        Pickler(io.BytesIO()).dump(value)
    except _PICKLING_ERRORS:
        return False
    return True
