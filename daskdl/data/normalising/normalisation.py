"""A normaliser that has been fitted: a transform of batches, and a plain value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from daskdl.data import batching
from daskdl.data.batching import Tree
from daskdl.data.normalising.scaling import Scaling
from daskdl.errors import DataError, OptionError


@dataclass(frozen=True)
class Normalisation:
    """What x is scaled by; goes where a `transform` does.

    Attributes:
        scalings: A tree like x, with a :class:`Scaling` for each array, and None for
            those that are left as they are.

    Example:
        >>> from daskdl.data.normalising.normalisers import Standardize
        >>> fitted = Standardize().fit(np.array([[1.0], [3.0]]), client=False)
        >>> x, y = fitted((np.array([[1.0], [2.0]]), None))
        >>> x
        array([[-1.],
               [ 0.]], dtype=float32)
        >>> Normalisation.from_dict(fitted.to_dict()) == fitted
        True
    """

    scalings: Tree

    def __call__(self, batch: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        """The same as `transform`."""
        return self.transform(batch)

    def transform(self, batch: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        """Scale the x of a batch.

        Args:
            batch: (x, y), trees of tensors on any device, or of numpy arrays.

        Returns:
            x in float32 where it is scaled; y as it came.

        Raises:
            DataError: If x has another structure, or rows of another shape, than what
                this was fitted on.
        """
        x, y = batch
        return self._mapped(Scaling.apply, x), y

    def inverse(self, x: Tree) -> Tree:
        """What x was before it was scaled.

        Args:
            x: A tree of tensors or arrays, as `transform` returns it.

        Raises:
            DataError: If it has another structure, or rows of another shape.
        """
        return self._mapped(Scaling.inverse, x)

    def to_dict(self) -> dict[str, Any]:
        """Lists, dicts, strings and numbers, as JSON holds them, exactly."""
        return {"x": _plain(self.scalings)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """What `to_dict` was called on.

        Args:
            plain: Its result, also after it has been through JSON.

        Raises:
            OptionError: If it is something else.
        """
        try:
            return cls(_tree(plain["x"]))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise OptionError(
                f"this is not what Normalisation.to_dict() returns: {error!r}"
            ) from error

    def _mapped(self, function: Any, x: Tree) -> Tree:
        if not alike(x, self.scalings):
            raise DataError(
                "the normaliser was fitted on x like "
                f"{batching.outline(self.scalings)}, got {batching.outline(x)}"
            )
        return batching.mapped(
            lambda leaf, own: leaf if own is None else function(own, leaf),
            x,
            self.scalings,
        )


def alike(one: Tree, two: Tree) -> bool:
    """Whether two trees have arrays in the same places.

    Example:
        >>> alike({"a": 1, "b": 2}, {"b": 3, "a": 4}), alike((1,), 1)
        (True, False)
    """
    first, second = ({name for name, _ in batching.named(t, "")} for t in (one, two))
    return first == second


def normaliser_from_dict(plain: Mapping[str, Any]) -> Normalisation:
    """The fitted normaliser that :meth:`Normalisation.to_dict` was called on."""
    return Normalisation.from_dict(plain)


def _plain(tree: Tree) -> Any:
    # A dict as pairs: JSON would make strings of keys that are numbers.
    if isinstance(tree, dict):
        return {"dict": [[key, _plain(child)] for key, child in tree.items()]}
    if isinstance(tree, tuple):
        return {"tuple": [_plain(child) for child in tree]}
    if tree is None:
        return None
    shift, scale = tree.shift.tolist(), tree.scale.tolist()
    return {"shift": shift, "scale": scale, "offset": float(tree.offset)}


def _tree(plain: Any) -> Tree:
    if plain is None:
        return None
    if "dict" in plain:
        return {key: _tree(child) for key, child in plain["dict"]}
    if "tuple" in plain:
        return tuple(_tree(child) for child in plain["tuple"])
    shift, scale = (np.array(plain[name]) for name in ("shift", "scale"))
    return Scaling(shift, scale, float(plain["offset"]))
