"""Arrays of predictions: a file of safetensors for each block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy
from dask.delayed import Delayed
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Tree
from daskdl.data.exports.schema import outline_of, restored
from daskdl.outputs.arrays import lazy_array
from daskdl.predictions.base import Encoded, Format


@dataclass(frozen=True)
class Arrays(Format):
    """A tree of arrays; each is called ``y``, ``y['name']`` and so on in the files.

    Attributes:
        outline: Of the tree, as plain values.
        leaves: dtype and shape of a row of each array.
    """

    outline: Any
    leaves: tuple[tuple[str, tuple[int, ...]], ...]

    kind = "arrays"
    suffix = "safetensors"

    @classmethod
    def of(cls, empty: Tree) -> "Arrays":
        """The format of outputs, of which these are those of no rows."""
        leaves = tuple((x.dtype.name, x.shape[1:]) for x in batching.leaves(empty))
        return cls(outline_of(empty), leaves)

    @override
    def encoded(self, value: Any) -> Encoded:
        # Of an array that is not contiguous, safetensors takes the wrong bytes.
        named = dict(zip(self._names(), map(np.ascontiguousarray, value), strict=True))
        return Encoded(len(value[0]), safetensors.numpy.save(named))

    @override
    def decoded(self, content: bytes) -> Any:
        arrays = safetensors.numpy.load(content)
        return [arrays[name] for name in self._names()]

    @override
    def to_json(self) -> dict[str, Any]:
        return {"outline": self.outline, "leaves": self.leaves}

    @override
    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Arrays":
        leaves = ((str(d), tuple(map(int, s))) for d, s in content["leaves"])
        return cls(content["outline"], tuple(leaves))

    @override
    def whole(self, values: Sequence[Any]) -> Any:
        joined = [np.concatenate(leaves) for leaves in zip(*values, strict=True)]
        return restored(self.outline, iter(joined))

    @override
    def lazy(self, parts: Sequence[Delayed], rows: Sequence[int]) -> Any:
        empty = [np.zeros((0, *shape), dtype) for dtype, shape in self.leaves]
        made = [lazy_array(parts, i, leaf, rows) for i, leaf in enumerate(empty)]
        return restored(self.outline, iter(made))

    def _names(self) -> list[str]:
        tree = restored(self.outline, iter(range(len(self.leaves))))
        return [name for name, _ in batching.named(tree, "y")]
