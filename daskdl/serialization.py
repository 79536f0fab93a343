"""Models, losses and optimizers as bytes, for the way through Dask.

Dask serialises a module attribute by attribute, which unties tied weights, and it
cannot serialise every tensor. So they travel as the bytes of ``torch.save`` with
cloudpickle: a storage is written once however many tensors look at it, lambdas and
classes of a notebook are included, and what was on an accelerator arrives on the CPU.

A module that torch cannot write so, and that a function has made, travels as this
function and its state: it is made where it is needed. Modules with parametrizations go
this way; where one was given itself, it is parametrized again on arrival.
"""

import copy
import io
import itertools
import pickle
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Self, TypeVar

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
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


# ---- modules that a function has made

MAKER = "_daskdl_maker"  # the attribute of such a module that says which it was
# All parts of those of this process. No two may have one in common.
_parts_made: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Maker:
    """The function that made a module; it stays at this one and goes with no copy."""

    def __init__(self, function: Callable[[], nn.Module]) -> None:
        self.function = function

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def made(function: Callable[[], nn.Module]) -> nn.Module:
    """Call a function that makes a module, which is called again for copies of it.

    Args:
        function: Leaves the random states alone. What it returns may be no module.

    Example:
        >>> class Locked(nn.Linear):
        ...     def __init__(self):
        ...         super().__init__(2, 1)
        ...         self.lock = threading.Lock()
        >>> module = made(Locked)
        >>> torch.equal(copied(module).weight, module.weight)
        True
    """
    module = function()
    if isinstance(module, nn.Module):
        vars(module)[MAKER] = _Maker(function)
        _parts_made.update(module.modules())
    return module


def _maker_of(value: Any) -> Callable[[], nn.Module] | None:
    maker = vars(value).get(MAKER) if isinstance(value, nn.Module) else None
    return None if maker is None else maker.function


def _remade(
    function: Callable[[], nn.Module], layout: Mapping[str, str], state: Any
) -> nn.Module:
    """Make a module once more, and give it the state of another one."""
    module = function()
    if not isinstance(module, nn.Module):
        raise ModelError(f"model must return a torch.nn.Module, got {module!r}")
    if any(part in _parts_made for part in module.modules()):
        raise ModelError(
            "model must make a new module at each call, got one that it has returned "
            "before, or that has layers of such a one"
        )
    _check_layout(_layout(module), layout)
    module = module.cpu()
    _load_state_(module, state)
    vars(module)[MAKER] = _Maker(function)
    _parts_made.update(module.modules())
    return module


def _layout(module: nn.Module) -> dict[str, str]:
    """What a copy has to have at the same places."""
    found = {}
    for path, part in module.named_modules():
        found[path] = f"a {type(part).__qualname__}"
        at = f"{path}." if path else ""
        for name, value in part._parameters.items():
            found[at + name] = f"a parameter {_described(value)}"
        found |= {at + name: "a buffer" for name in part._buffers}
    return found


def _described(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _check_layout(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    for path in {**expected, **found}:
        new, old = found.get(path, "nothing"), expected.get(path, "nothing")
        if new != old:
            raise ModelError(
                "model must make the same module at each call, since it cannot be "
                f"pickled and is made wherever it is needed; {path or 'it'} is {new} "
                f"now, and was {old}"
            )


_PLAIN = (bool, int, float, str)


def _state_of(module: nn.Module) -> dict[str, list[Any]]:
    """What has changed since it was made, for each part: tensors, and plain values."""
    extra = nn.Module.get_extra_state
    return {
        path: [
            {n: None if p is None else p.detach() for n, p in part._parameters.items()},
            [
                n
                for n, p in part._parameters.items()
                if p is not None and p.requires_grad
            ],
            {n: None if b is None else b.detach() for n, b in part._buffers.items()},
            {n: value for n, value in vars(part).items() if type(value) in _PLAIN},
            *([] if type(part).get_extra_state is extra else [part.get_extra_state()]),
        ]
        for path, part in module.named_modules()
    }


def _load_state_(module: nn.Module, state: Mapping[str, list[Any]]) -> None:
    for path, part in module.named_modules():
        parameters, trained, buffers, plain, *extra = state[path]
        with torch.no_grad():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    parameter.copy_(parameters[name])
                    parameter.requires_grad_(name in trained)
        part._buffers.update(buffers)
        vars(part).update(plain)
        for one in extra:
            part.set_extra_state(one)


class _Making(Pickler):
    """Writes a module that a function has made as this function and the state."""

    @override
    def reducer_override(self, obj: Any) -> Any:
        function = _maker_of(obj)
        if function is None:
            return super().reducer_override(obj)
        # By itself: a module that it refers to is not made by it once more.
        written = io.BytesIO()
        Pickler(written).dump(function)
        return _remade_there, (written.getvalue(), _layout(obj), _state_of(obj))


def _remade_there(function: bytes, layout: Mapping[str, str], state: Any) -> nn.Module:
    return _remade(pickle.loads(function), layout, state)


class _Kept:
    """What the bytes of a pack stand for that stays in this process."""

    def __init__(self, value: Any) -> None:
        self.value = value


_kept: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _staying(mine: list[_Kept]) -> type[Pickler]:
    """Of packs that stay in this process, where functions need not be written.

    Args:
        mine: Gets what has to be kept as long as the bytes.
    """

    def keep(value: Any) -> int:
        number, holder = next(_numbers), _Kept(value)
        _kept[number] = holder
        mine.append(holder)
        return number

    class Staying(Pickler):
        @override
        def reducer_override(self, obj: Any) -> Any:
            function = _maker_of(obj)
            if function is not None:
                return _remade_here, (keep(function), _layout(obj), _state_of(obj))
            if isinstance(obj, nn.Module) and _pickling_error(obj, Pickler):
                return _copied_here, (keep(copy.deepcopy(obj).cpu()),)
            return super().reducer_override(obj)

    return Staying


def _remade_here(number: int, layout: Mapping[str, str], state: Any) -> nn.Module:
    return _remade(_kept[number].value, layout, state)


def _copied_here(number: int) -> Any:
    return copy.deepcopy(_kept[number].value)


# ---- packs


class Packed(Generic[T]):
    """A value as bytes; pickles and travels as these bytes only.

    Args:
        content: What to pack; read only, may be anything that cloudpickle can write.
        argument: Its name in the user's call, for messages.
        here: It stays in this process: modules in it need not be pickled, if a function
            has made them, or if they can be copied.

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
    _mine: list[_Kept]  # empty: it may travel

    def __init__(self, content: T, argument: str, *, here: bool = False) -> None:
        self.argument = argument
        self._mine = []
        written = _packed(content, argument, self._mine if here else None)
        self.payload = np.frombuffer(written, np.uint8)
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
        if self._mine:
            raise pickle.PicklingError(f"{self.argument} stays in this process")
        if not self.payload.nbytes:
            raise pickle.PicklingError(f"{self.argument} was opened, to stay here")
        return {"argument": self.argument, "payload": self.payload}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._mine = []
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

    def __init__(self, module: nn.Module, *, here: bool = False) -> None:
        super().__init__(module, "model", here=here)

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


def copied(module: nn.Module) -> nn.Module:
    """A copy on the CPU, as replicas get one, for this process only.

    Raises:
        ModelError: If it can be had in no way.
    """
    return PackedModel(module, here=True).unpack()


def _with_same_tensors(module: nn.Module) -> nn.Module:
    """A copy that takes no memory for parameters and buffers."""
    if _maker_of(module) is None:
        tensors = [*module.parameters(), *module.buffers()]
        return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    own = copied(module)
    for mine, theirs in zip(own.modules(), module.modules(), strict=True):
        for name, tensor in (*theirs._parameters.items(), *theirs._buffers.items()):
            setattr(mine, name, tensor)
    return own


def _packed(content: Any, argument: str, mine: list[_Kept] | None) -> bytes:
    """Write it in the first way that can be.

    Args:
        content: What to write.
        argument: Its name.
        mine: Gets what is kept for bytes that stay in this process; None: they do not.
    """
    errors: list[Exception] = []
    ways: list[type[Any]] = [cloudpickle.Pickler, _Making, Pickler]
    for pickler in ways if mine is None else [*ways, _staying(mine)]:
        buffer = io.BytesIO()
        module = types.SimpleNamespace(Pickler=pickler, __name__=__name__)
        try:
            # Protocol 5: cloudpickle writes nested classes only from protocol 4 on.
            torch.save(content, buffer, pickle_module=module, pickle_protocol=5)
        except _PICKLING_ERRORS as error:
            errors.append(error)
        else:
            return buffer.getvalue()
    raise _refusal(content, argument, mine is not None) from errors[1]


def _refusal(content: Any, argument: str, here: bool) -> ModelError:
    """What cannot be written, and why."""
    function = _maker_of(content) or _maker_of(getattr(content, "model", None))
    pickler = _Making if function is None else Pickler
    blamed = next(_unpicklable(content, argument, pickler), None) or argument
    error = _pickling_error(content, pickler)
    message = (
        f"{argument} cannot be {'copied' if here else 'sent to the workers'}, because "
        f"{blamed} cannot be pickled: {error}"
    )
    reason = None if function is None else _pickling_error(function, Pickler)
    if reason is not None:
        message += f"; nor can the function that makes the model: {reason}"
    message += "; create it when it is first used, or leave it out in __getstate__"
    if function is None and isinstance(content, nn.Module):
        message += (
            "; or give a Trainer a function that makes the model, which is then called "
            "where a copy is needed"
        )
    return ModelError(message)


def _unpicklable(
    value: Any, path: str, pickler: type[Any], seen: frozenset[int] = frozenset()
) -> Iterator[str]:
    """The innermost attributes that cannot be pickled, as paths with their types."""
    seen |= {id(value)}  # two objects that know each other would go round for ever
    for step, part in _parts(value):
        if id(part) not in seen and _pickling_error(part, pickler):
            kind = type(part)
            inner = next(_unpicklable(part, path + step, pickler, seen), None)
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


def _pickling_error(value: Any, pickler: type[Any]) -> Exception | None:
    try:
        pickler(io.BytesIO()).dump(value)
    except _PICKLING_ERRORS as error:
        return error
    return None
