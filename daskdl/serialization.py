"""Models, losses and optimizers as bytes, for transport through Dask.

Dask serializes a module attribute by attribute, which unties tied weights, and it
cannot serialize every tensor. This module uses ``torch.save`` with cloudpickle instead:
each storage is written once, lambdas and classes of a notebook are included, and
tensors of an accelerator are loaded on the CPU.

A module that cannot be pickled but was created by a function is pickled as the function
and the module's state; unpickling calls the function again. Other modules with
parametrizations are parametrized again when they are unpickled.

Code of a notebook or script is pickled with the name and the lines of its file, which
tracebacks in other processes show.
"""

import copy
import io
import itertools
import linecache
import pickle
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from typing_extensions import override

from daskdl.errors import ModelError

T = TypeVar("T")

IMPORTING_S = 10.0  # longest wait for another thread that imports the same package
RETRY_S = 0.05

_PLAIN = (bool, int, float, str)
# Exceptions that pickling an unpicklable value may raise.
_PICKLING_ERRORS = (
    pickle.PicklingError,
    TypeError,
    AttributeError,
    ValueError,
    RuntimeError,
    NotImplementedError,
)


class _Kept:
    """A value that stays in this process and is pickled as a reference."""

    def __init__(self, value: Any) -> None:
        self.value = value
        _kept[id(self)] = self

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _look_up, (id(self),)


_kept: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()


def _look_up(number: int) -> _Kept:
    return _kept[number]


def _value_of(kept: _Kept) -> Any:
    return kept.value


def _has_no_module(kind: type) -> bool:
    """Whether a class is that of a script, a notebook or a function."""
    return kind.__module__ == "__main__" or "<locals>" in kind.__qualname__


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, which also supports modules with parametrizations.

    Torch gives each such module its own class, which cannot be pickled. The module is
    pickled with its original class, and parametrized again when it is unpickled.
    """

    remakes = False  # whether a module is pickled as the function that created it
    copies = False  # whether what cannot be pickled is kept, and copied when unpickled
    # Values to which the pickle refers; None: the pickle may leave this process.
    kept: list[_Kept] | None = None

    @override
    def reducer_override(self, obj: Any) -> Any:
        if self.kept is not None and isinstance(obj, type) and _has_no_module(obj):
            # The same class has its source in tracebacks, which a copy has not.
            return _value_of, (self._keep(obj),)
        if isinstance(obj, types.CodeType):
            create, arguments = self.dispatch_table[types.CodeType](obj)
            lines = linecache.getlines(obj.co_filename)
            return _code, (create, arguments, obj.co_filename, lines)
        if not isinstance(obj, nn.Module):
            return super().reducer_override(obj)
        function = _maker_of(obj) if self.remakes else None
        if function is not None and self.copies:
            return _remade, (self._keep(function), _state_of(obj))
        if function is not None:
            # A separate pickle with modules in full: the function may refer to the
            # module that it created.
            written = io.BytesIO()
            _Pickler(written).dump(function)
            return _remade, (written.getvalue(), _state_of(obj))
        if self.copies and _pickling_error(obj, _Pickler):
            return _copied, (self._keep(copy.deepcopy(obj).cpu()),)
        if parametrize.is_parametrized(obj):
            kind = parametrize.type_before_parametrizations(obj)
            state: Any = kind.__getstate__  # torch's added class has one that raises
            return _bare, (kind,), state(obj), None, None, _parametrize_
        return super().reducer_override(obj)

    def _keep(self, value: Any) -> _Kept:
        assert self.kept is not None
        self.kept.append(_Kept(value))
        return self.kept[-1]


class _RemakingPickler(_Pickler):
    remakes = True


class _PartState(NamedTuple):
    """State of a submodule that may have changed since the submodule was created."""

    kind: str  # name of its class
    parameters: dict[str, Tensor]
    trained: list[str]  # parameters that are not frozen
    buffers: dict[str, Tensor | None]
    plain: dict[str, Any]  # attributes that are numbers or strings
    extra: list[Any]  # the result of `get_extra_state`, if the class defines it


def _copied(kept: _Kept) -> Any:
    return copy.deepcopy(kept.value)


def _code(
    create: Callable[..., types.CodeType],
    arguments: tuple[Any, ...],
    file: str,
    lines: list[str],
) -> types.CodeType:
    """Create code with the name of its file, which cloudpickle leaves out.

    The lines are kept for tracebacks if this machine does not have the file.
    """
    if lines and not Path(file).is_file():
        size = sum(len(line) for line in lines)
        linecache.cache[file] = (size, None, lines, file)  # None: never out of date
    return create(*arguments).replace(co_filename=file)


def _bare(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _parametrize_(module: nn.Module, state: dict[str, Any]) -> None:
    module.__setstate__(state)  # type: ignore[no-untyped-call]
    # Private in torch 2.7 to 2.13. The public function, `register_parametrization`,
    # would replace the original tensors by the inverse of the parametrization.
    parametrize._inject_new_class(module)
    assert isinstance(module.parametrizations, nn.ModuleDict)
    for name in module.parametrizations:
        parametrize._inject_property(module, name)


# ---- modules created by a function

MAKER = "_daskdl_maker"  # attribute of the module that holds the function
# Submodules of all created modules in this process; no two modules may share one.
_created_parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Maker:
    """The function that created a module; copies of the module do not keep it."""

    def __init__(self, function: Callable[[], nn.Module]) -> None:
        self.function = function

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def created(function: Callable[[], nn.Module]) -> nn.Module:
    """Create a module with a function; copying the module calls the function again.

    What the function puts on an accelerator comes to the CPU.
    """
    module = function()
    if isinstance(module, nn.Module):
        tensors = itertools.chain(module.parameters(), module.buffers())
        if any(tensor.device.type not in ("cpu", "meta") for tensor in tensors):
            module = module.cpu()
        _keep_on_one_device_(module)
        _note_maker(module, function)
    return module


def _keep_on_one_device_(module: nn.Module) -> None:
    """Let each `DataParallel` compute where its parameters are, as without CUDA."""
    for part in module.modules():
        if isinstance(part, nn.DataParallel):
            part.device_ids = []


def _note_maker(module: nn.Module, function: Callable[[], nn.Module]) -> None:
    vars(module)[MAKER] = _Maker(function)
    _created_parts.update(module.modules())


def _maker_of(value: Any) -> Callable[[], nn.Module] | None:
    maker = vars(value).get(MAKER) if isinstance(value, nn.Module) else None
    return None if maker is None else maker.function


def _remade(reference: bytes | _Kept, state: Mapping[str, _PartState]) -> nn.Module:
    """Create a module with its function again, and load the original's state."""
    function: Callable[[], nn.Module] = (
        reference.value if isinstance(reference, _Kept) else pickle.loads(reference)
    )
    module = function()
    if not isinstance(module, nn.Module):
        raise ModelError(f"model must return a torch.nn.Module, got {module!r}")
    if any(part in _created_parts for part in module.modules()):
        raise ModelError(
            "model must return a new module at each call, got an earlier result, or "
            "one that shares layers with an earlier result"
        )
    current, expected = _layout(_state_of(module)), _layout(state)
    for path in {**expected, **current}:
        new, old = current.get(path, "missing"), expected.get(path, "missing")
        if new != old:
            raise ModelError(
                "model must return the same kind of module at each call, because the "
                "module cannot be pickled and each process calls the function again; "
                f"{path or 'the module'} is {new}, but was {old} before"
            )
    module = module.cpu()
    _keep_on_one_device_(module)
    for path, part in module.named_modules():
        part_state = state[path]
        with torch.no_grad():
            for name, parameter in _parameters(part).items():
                parameter.copy_(part_state.parameters[name])
                parameter.requires_grad_(name in part_state.trained)
        part._buffers.update(part_state.buffers)
        vars(part).update(part_state.plain)
        for extra in part_state.extra:
            part.set_extra_state(extra)
    _note_maker(module, function)
    return module


def _parameters(part: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a submodule, without those of its children."""
    return dict(part.named_parameters(recurse=False, remove_duplicate=False))


def _state_of(module: nn.Module) -> dict[str, _PartState]:
    states = {}
    for path, part in module.named_modules():
        parameters = _parameters(part)
        has_extra = type(part).get_extra_state is not nn.Module.get_extra_state
        # `_buffers` is private in torch 2.7 to 2.13: `named_buffers` leaves out
        # buffers that are None, which the original may have replaced by tensors.
        buffers = {
            n: None if b is None else b.detach() for n, b in part._buffers.items()
        }
        states[path] = _PartState(
            kind=type(part).__qualname__,
            parameters={n: p.detach() for n, p in parameters.items()},
            trained=[n for n, p in parameters.items() if p.requires_grad],
            buffers=buffers,
            plain={n: v for n, v in vars(part).items() if type(v) in _PLAIN},
            extra=[part.get_extra_state()] if has_extra else [],
        )
    return states


def _layout(states: Mapping[str, _PartState]) -> dict[str, str]:
    """Describe the modules, parameters and buffers that a copy must have, by path."""
    described = {}
    for path, state in states.items():
        described[path] = f"a {state.kind}"
        prefix = f"{path}." if path else ""
        for name, value in state.parameters.items():
            dtype = str(value.dtype).removeprefix("torch.")
            described[prefix + name] = f"a parameter {dtype} {tuple(value.shape)}"
        described |= {prefix + name: "a buffer" for name in state.buffers}
    return described


# ---- packed values


class Packed(Generic[T]):
    """A value as bytes, which are pickled instead of the value.

    Args:
        content: Value to pack, not changed; any value that cloudpickle can write.
        argument: Name of the value in the user's call, for messages.
        here: Whether the bytes stay in this process. Modules that cannot be pickled
            are then allowed if a function created them or they can be copied.
    """

    argument: str
    payload: np.ndarray  # uint8; Dask transfers arrays without a copy
    _content: T | None
    _lock: threading.Lock
    _kept: list[_Kept]  # values to which the payload refers; empty: it may be pickled

    def __init__(self, content: T, argument: str, *, here: bool = False) -> None:
        self.argument = argument
        self._kept = []
        written = _packed(content, argument, self._kept if here else None)
        self.payload = np.frombuffer(written, np.uint8)
        self._forget()

    @classmethod
    def of(cls, payload: np.ndarray, argument: str) -> Self:
        """Return a packed value with the bytes of another one."""
        packed = cls.__new__(cls)
        packed.__setstate__({"argument": argument, "payload": payload})
        return packed

    def unpack(self) -> T:
        """Return a new copy on the CPU at each call."""
        try:
            return self._loaded()
        except (ImportError, AttributeError) as error:
            raise ModelError(
                f"{self.argument} cannot be unpacked here: {error}; every worker "
                "needs the Python modules that define it: install them there, or use "
                "client.upload_file or cloudpickle.register_pickle_by_value"
            ) from error

    def _loaded(self) -> T:
        deadline = time.monotonic() + IMPORTING_S
        while True:
            try:
                content: T = torch.load(
                    io.BytesIO(self.payload.data),
                    map_location="cpu",
                    weights_only=False,
                )
            except ImportError as error:
                # Another thread may be importing the same package, with circular
                # imports such as those of dask.array.
                unfinished = "partially initialized module" in str(error)
                if not unfinished or time.monotonic() > deadline:
                    raise
            else:
                return content
            time.sleep(RETRY_S)

    def shared(self, prepare: Callable[[T], T] | None = None) -> T:
        """Return one copy for all calls, unpacked at the first call.

        Threads share the copy and must not change it; :meth:`unpack` returns a copy to
        train.
        """
        with self._lock:
            if self._content is None:
                content = self.unpack()
                self._content = content if prepare is None else prepare(content)
            return self._content

    def opened(self, prepare: Callable[[T], T] | None = None) -> T:
        """Return the same as `shared` and free the bytes; pickling then fails.

        The process then holds only one copy of the value.
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
        """Return the bytes that Dask counts for a copy."""
        return object.__sizeof__(self) + self.payload.nbytes

    def __getstate__(self) -> dict[str, Any]:
        if self._kept:
            raise pickle.PicklingError(f"{self.argument} cannot leave this process")
        if not self.payload.nbytes:
            raise pickle.PicklingError(f"{self.argument} has already been opened")
        return {"argument": self.argument, "payload": self.payload}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._kept = []
        self._forget()

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.argument}, {self.payload.nbytes} bytes)"


class PackedModel(Packed[nn.Module]):
    """A module as bytes."""

    def __init__(self, module: nn.Module, *, here: bool = False) -> None:
        super().__init__(module, "model", here=here)

    @override
    def unpack(self) -> nn.Module:
        module = super().unpack()
        _keep_on_one_device_(module)
        return module

    _of_thread: threading.local

    def module(
        self, prepare: Callable[[nn.Module], nn.Module] | None = None
    ) -> nn.Module:
        """Return this thread's module, whose tensors all threads of the process share.

        Forward passes may set attributes and read them later, so threads must not share
        one module.
        """
        module: nn.Module | None = getattr(self._of_thread, "module", None)
        if module is None:
            module = self._of_thread.module = _with_same_tensors(self.shared(prepare))
        return module

    @override
    def _forget(self) -> None:
        super()._forget()
        self._of_thread = threading.local()


def copied(module: nn.Module) -> nn.Module:
    """Return a copy on the CPU, like the one that a replica in this process gets."""
    return PackedModel(module, here=True).unpack()


def _with_same_tensors(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares its parameters and buffers."""
    if _maker_of(module) is None:
        tensors = [*module.parameters(), *module.buffers()]
        return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    copy_of_module = copied(module)
    for target, part in zip(copy_of_module.modules(), module.modules(), strict=True):
        buffers = part.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in (*_parameters(part).items(), *buffers):
            setattr(target, name, tensor)
    return copy_of_module


def _packed(content: Any, argument: str, kept: list[_Kept] | None) -> bytes:
    """Write a value with the first pickler that can."""
    errors: list[Exception] = []
    picklers: list[type[Any]] = [_Pickler, _RemakingPickler]
    if kept is not None:
        stays = {"kept": kept}
        picklers = [
            type("_StayingPickler", (_Pickler,), stays),
            type("_StayingPickler", (_RemakingPickler,), stays),
            type("_StayingPickler", (_RemakingPickler,), {**stays, "copies": True}),
        ]
    for pickler in picklers:
        buffer = io.BytesIO()
        module = types.SimpleNamespace(Pickler=pickler, __name__=__name__)
        try:
            # Protocol 5: cloudpickle needs at least 4 to write nested classes.
            torch.save(content, buffer, pickle_module=module, pickle_protocol=5)
        except _PICKLING_ERRORS as error:
            errors.append(error)
        else:
            return buffer.getvalue()
    raise _refusal(content, argument, kept is not None) from errors[1]


def _refusal(content: Any, argument: str, here: bool) -> ModelError:
    """Return an error that names the unpicklable attribute and the reason."""
    function = _maker_of(content) or _maker_of(getattr(content, "model", None))
    pickler = _RemakingPickler if function is None else _Pickler
    blamed = next(_unpicklable(content, argument, pickler), None) or argument
    error = _pickling_error(content, pickler)
    message = (
        f"{argument} cannot be {'copied' if here else 'sent to the workers'}, because "
        f"{blamed} cannot be pickled: {error}"
    )
    reason = None if function is None else _pickling_error(function, _Pickler)
    if reason is not None:
        message += f"; nor can the function that creates the model: {reason}"
    message += "; create it on first use, or exclude it in __getstate__"
    if function is None and isinstance(content, nn.Module):
        message += (
            "; or pass Trainer a function that creates the model, which is called "
            "wherever a copy is needed"
        )
    return ModelError(message)


def _unpicklable(
    value: Any, path: str, pickler: type[Any], seen: frozenset[int] = frozenset()
) -> Iterator[str]:
    """Yield the innermost attributes that cannot be pickled, as paths with types."""
    seen |= {id(value)}  # values may contain each other
    for step, part in _parts(value):
        if id(part) not in seen and _pickling_error(part, pickler):
            kind = type(part)
            inner = next(_unpicklable(part, path + step, pickler, seen), None)
            yield inner or f"{path}{step} (a {kind.__module__}.{kind.__qualname__})"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        # With the names that users write, not as items of `_modules`.
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


def _pickling_error(value: Any, pickler: type[Any]) -> Exception | None:
    try:
        pickler(io.BytesIO()).dump(value)
    except _PICKLING_ERRORS as error:
        return error
    return None
