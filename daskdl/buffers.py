"""What of a module is state and not trained, and what several replicas make of theirs.

Buffers, and frozen parameters that the model changes itself, are not thresholded:
replicas average them where they meet.

Shape suffixes: F = floating and I = integer buffer elements.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from daskdl.errors import ModelError


class Buffers(NamedTuple):
    """The buffers of a module, as plain numbers."""

    floating_F: npt.NDArray[np.float64]  # complex ones as pairs
    integer_I: npt.NDArray[np.int64]  # bool ones as 0 and 1


def pack_buffers(module: nn.Module) -> Buffers:
    """Copy a module's buffers, persistent or not, into two arrays.

    Args:
        module: Read only. A buffer that is registered twice is taken once.

    Returns:
        Floating (and complex) and integer (and bool) ones, as in ``named_buffers``.

    Example:
        >>> pack_buffers(torch.nn.BatchNorm1d(2))
        Buffers(floating_F=array([0., 0., 1., 1.]), integer_I=array([0]))
    """
    floating = [np.empty(0, np.float64)]
    integer = [np.empty(0, np.int64)]
    for buffer in module.buffers():
        if buffer.is_floating_point() or buffer.is_complex():
            floating.append(_real(buffer).cpu().double().numpy().ravel())
        else:
            integer.append(buffer.cpu().long().numpy().ravel())
    return Buffers(np.concatenate(floating), np.concatenate(integer))


def average_buffers(packed: Sequence[tuple[Buffers, int]]) -> Buffers:
    """Merge the buffers of several replicas.

    Args:
        packed: Buffers and examples trained on, one pair per replica; the order
            decides the rounding.

    Returns:
        Floating ones: mean weighted by examples, plain if all weights are 0; values
        on which all agree stay as they are, infinities too. Integer ones: maximum.

    Raises:
        ModelError: If there is none, or they have different sizes.

    Example:
        >>> one = Buffers(np.array([1.0]), np.array([3]))
        >>> two = Buffers(np.array([4.0]), np.array([5]))
        >>> average_buffers([(one, 20), (two, 10)])
        Buffers(floating_F=array([2.]), integer_I=array([5]))
    """
    sizes = {(b.floating_F.size, b.integer_I.size) for b, _ in packed}
    if len(sizes) != 1:
        raise ModelError(f"need buffers of one size, got {sorted(sizes)}")
    total = sum(examples for _, examples in packed)
    used = [(b, n if total else 1) for b, n in packed if n or not total]
    first = used[0][0].floating_F
    weighted, agreed = np.zeros_like(first), np.ones(first.shape, bool)
    with np.errstate(invalid="ignore"):  # infinities of both signs: NaN is the answer
        for buffers, examples in used:
            weighted += buffers.floating_F * examples
            agreed &= buffers.floating_F == first
    mean = weighted / sum(examples for _, examples in used)
    integer_I = np.max([buffers.integer_I for buffers, _ in packed], axis=0)
    return Buffers(np.where(agreed, first, mean), integer_I)


def load_buffers_(module: nn.Module, buffers: Buffers) -> None:
    """Write packed buffers back.

    Args:
        module: Built like the one that was packed. Changed in place.
        buffers: What :func:`pack_buffers` or :func:`average_buffers` returned.

    Raises:
        ModelError: If the module's buffers have other sizes; nothing is written.

    Example:
        >>> layer = torch.nn.BatchNorm1d(1)
        >>> load_buffers_(layer, Buffers(np.array([0.5, 2.0]), np.array([7])))
        >>> layer.running_mean.item(), layer.num_batches_tracked.item()
        (0.5, 7)
    """
    got = [part.size for part in buffers]
    want = [part.size for part in pack_buffers(module)]
    if got != want:
        raise ModelError(f"got [floating, integer] buffers {got}, model has {want}")
    # Copied: they may be read-only, and torch does not take those.
    floating, integer = (torch.from_numpy(part.copy()) for part in buffers)
    with torch.no_grad():
        for target in (_real(buffer) for buffer in module.buffers()):
            if target.is_floating_point():
                part, floating = floating.tensor_split([target.numel()])
            else:
                part, integer = integer.tensor_split([target.numel()])
            target.copy_(part.view(target.shape))


FROZEN = "frozen "  # before the names of arrays


class Frozen:
    """Frozen parameters that a module changes itself, such as averages of others.

    Of those that stay as they are, however large, nothing is copied or sent.

    Args:
        module: As it is at the start, on the client too.

    Example:
        >>> layer = torch.nn.Linear(1, 1).requires_grad_(False)
        >>> frozen = Frozen(layer)
        >>> _ = layer.bias.data.fill_(0.5)
        >>> frozen.look()
        >>> frozen.take()
        {'frozen bias': array([0.5], dtype=float32)}
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forms = _forms(module)
        self._changed: dict[str, None] = {}  # at any time, in their order
        self._steps = 0
        self._checksums = {n: _checksum(p) for n, p in self._parameters().items()}

    def _parameters(self) -> dict[str, Tensor]:
        named = self._module.named_parameters()
        return {n: p.detach() for n, p in named if not p.requires_grad}

    def look(self) -> None:
        """Find out what has changed; a pass over all frozen parameters.

        Raises:
            ModelError: If one, or a buffer, has another shape or dtype by now.
        """
        self._check()
        for name, parameter in self._parameters().items():
            if _checksum(parameter) != self._checksums.get(name):
                self._changed[name] = None

    def after_step(self) -> None:
        """Look after steps 1, 2, 4, 8 and so on.

        What a model changes itself, it mostly changes in each step from some step on,
        and a pass after each would be dear.

        Raises:
            ModelError: See `look`.
        """
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:
            self.look()

    def _check(self) -> None:
        forms = _forms(self._module)
        for name in {**self._forms, **forms}:
            before, now = self._forms.get(name), forms.get(name)
            if before != now:
                raise ModelError(
                    f"{name} of the model was {before} before the fit and is {now} "
                    "now: several replicas can only average what keeps its shape and "
                    "dtype; give it those before the fit, or train one replica"
                )

    def take(self) -> dict[str, npt.NDArray[Any]]:
        """Copy those that have changed, by name behind `FROZEN`.

        Raises:
            ModelError: See `look`.
        """
        self._check()
        own = self._parameters()
        return {FROZEN + name: _array(own[name]) for name in self._changed}

    def load_(self, arrays: Mapping[str, Any]) -> None:
        """Write what `take` returned here or elsewhere; other names are left out."""
        own = {n: a for n, a in arrays.items() if n.startswith(FROZEN)}
        load_frozen_(self._module, own)
        self._changed.update((n.removeprefix(FROZEN), None) for n in own)


def average_frozen(
    packed: Sequence[tuple[Mapping[str, Any], int]],
) -> dict[str, npt.NDArray[Any]]:
    """Merge what several replicas have changed; who has not does not count.

    Args:
        packed: What `Frozen.take` returned, maybe among other things, and examples
            trained on, one pair per replica; the order decides the rounding.

    Returns:
        As :func:`average_buffers`.

    Example:
        >>> one, two = {"frozen a": np.float32([1])}, {"frozen a": np.float32([4])}
        >>> average_frozen([(one, 20), (two, 10), ({}, 5)])
        {'frozen a': array([2.], dtype=float32)}
    """
    names = dict.fromkeys(n for a, _ in packed for n in a if n.startswith(FROZEN))
    return {
        name: _average([(a[name], n) for a, n in packed if name in a]) for name in names
    }


def _average(packed: Sequence[tuple[npt.NDArray[Any], int]]) -> npt.NDArray[Any]:
    total = sum(examples for _, examples in packed)
    used = [(a, n if total else 1) for a, n in packed if n or not total]
    first = used[0][0]
    if first.dtype.kind not in "fc":
        most: npt.NDArray[Any] = np.max([array for array, _ in packed], axis=0)
        return most
    wide = np.result_type(first, np.float64)
    weighted = np.zeros(first.shape, wide)
    for array, examples in used:
        weighted += array * wide.type(examples)
    mean = (weighted / sum(examples for _, examples in used)).astype(first.dtype)
    alike = all(np.array_equal(array, first) for array, _ in used)
    return np.array(first) if alike else mean


def load_frozen_(module: nn.Module, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write frozen parameters back.

    Args:
        module: Built like the one they are of. Changed in place.
        arrays: What `Frozen.take` returned.
    """
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, array in arrays.items():
            # Copied: it may be read-only, and torch does not take those.
            own[name.removeprefix(FROZEN)].copy_(torch.from_numpy(np.array(array)))


def _forms(module: nn.Module) -> dict[str, str]:
    frozen = [(n, p) for n, p in module.named_parameters() if not p.requires_grad]
    return {
        n: f"{t.dtype} {tuple(t.shape)}" for n, t in (*frozen, *module.named_buffers())
    }


def _checksum(tensor: Tensor) -> int:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(plain.view(torch.uint8).numpy().data)


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return np.array(tensor.cpu().numpy())


def _real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer
