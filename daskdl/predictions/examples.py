"""Predictions for single examples, with keys or without: a file for each partition.

A file of safetensors has for each shape of outputs ``0/y``, ``1/y`` ... with a row for
each example, and in ``0/rows``, ``1/rows`` ... the places of these examples. ``keys``
are the bytes of JSON, see :mod:`daskdl.outputs.keys`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import safetensors.numpy
from dask.delayed import Delayed
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Tree
from daskdl.data.exports.schema import restored
from daskdl.outputs import keys
from daskdl.predictions.base import Encoded, Format

_ROWS = "rows"
_KEYS = "keys"


@dataclass(frozen=True)
class Examples(Format):
    """Outputs of examples, in their order, or of rows where a list has such parts.

    Attributes:
        outline: Of the tree of an output, as plain values.
        keyed: Whether examples have keys.
        collection: What the parts are put together to.
    """

    outline: Any
    keyed: bool
    collection: Literal["bag", "list"]

    kind = "examples"
    suffix = "safetensors"

    @override
    def encoded(self, value: Any) -> Encoded:
        if not isinstance(value, list):
            named = {n: np.ascontiguousarray(x) for n, x in batching.named(value, "y")}
            return Encoded(batching.length(value), safetensors.numpy.save(named))
        arrays: dict[str, np.ndarray] = {_ROWS: np.array([len(value)])}
        outputs = value
        if self.keyed:
            own, outputs = keys.split(value, "the outputs")
            arrays[_KEYS] = np.frombuffer(keys.written(own), np.uint8)
        arrays |= dict(_grouped(outputs))
        return Encoded(len(value), safetensors.numpy.save(arrays))

    @override
    def decoded(self, content: bytes) -> Any:
        arrays = safetensors.numpy.load(content)
        if _ROWS not in arrays:
            return self._tree(arrays, "")
        outputs: list[Any] = [None] * int(arrays[_ROWS][0])
        for name in [name for name in arrays if name.endswith(f"/{_ROWS}")]:
            tree = self._tree(arrays, name.removesuffix(_ROWS))
            for row, place in enumerate(arrays[name]):
                outputs[place] = batching.rows(tree, row)
        if not self.keyed:
            return outputs
        own = keys.read(arrays[_KEYS].tobytes())
        return list(zip(own, outputs, strict=True))

    @override
    def to_json(self) -> dict[str, Any]:
        return {
            "outline": self.outline,
            "keyed": self.keyed,
            "collection": self.collection,
        }

    @override
    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Examples":
        collection: Literal["bag", "list"] = (
            "bag" if content["collection"] == "bag" else "list"
        )
        return cls(content["outline"], bool(content["keyed"]), collection)

    @override
    def whole(self, values: Sequence[Any]) -> Any:
        if self.collection == "list":
            return list(values)
        return [one for value in values for one in value]

    @override
    def lazy(self, parts: Sequence[Delayed], rows: Sequence[int]) -> Any:
        if self.collection == "list":
            return list(parts)
        from dask.bag import from_delayed

        return from_delayed(list(parts))

    def _tree(self, arrays: Mapping[str, np.ndarray], before: str) -> Tree:
        places = restored(self.outline, iter(range(len(arrays))))
        named = batching.named(places, f"{before}y")
        return restored(self.outline, iter([arrays[name] for name, _ in named]))


def _grouped(outputs: Sequence[Tree]) -> Iterator[tuple[str, np.ndarray]]:
    """Outputs of one shape as one array for each place in their tree, by name."""
    places: defaultdict[Any, list[int]] = defaultdict(list)
    for place, output in enumerate(outputs):
        kinds = [(leaf.dtype.name, leaf.shape) for leaf in batching.leaves(output)]
        places[tuple(kinds)].append(place)
    for group, chosen in enumerate(places.values()):
        yield f"{group}/{_ROWS}", np.array(chosen)
        together = batching.mapped(
            lambda *leaves: np.stack(leaves), *(outputs[place] for place in chosen)
        )
        yield from batching.named(together, f"{group}/y")
