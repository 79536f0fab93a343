"""Several tensors with names in each file, in the safetensors format."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load
from typing_extensions import override

from daskdl.data.batching import Rows, Tree
from daskdl.data.formats.loaders import Format
from daskdl.data.formats.npz import check_names, named_rows, picked, wanted_names
from daskdl.data.formats.results import header_facts, reading
from daskdl.data.source import Facts
from daskdl.data.stores.store import Store
from daskdl.errors import DataError

_LENGTH_BYTES = 8  # the file begins with the length of its header
_LARGEST_HEADER_BYTES = 100_000_000  # the limit of the format's own reader
# What `as_numpy` makes of the tensors; others are learnt by loading them.
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "BF16": "float32",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
}


@dataclass(frozen=True)
class Safetensors(Format):
    """The tensors of a safetensors file that have these names.

    Attributes:
        x: A name; or a tuple or dict of names for several inputs.
        y: Also; None: there are no labels.
    """

    x: Tree = "x"
    y: Tree = "y"

    @override
    def __call__(self, content: bytes, name: str) -> Rows:
        try:
            tensors = load(content)
        except SafetensorError as error:
            raise DataError(f"cannot read {name}: {error}") from error
        return named_rows(self.x, self.y, tensors, name)

    @override
    def look(self, store: Store, name: str) -> Facts:
        url = store.url_of(name)
        with reading(url):
            header = _header(store, name)
        check_names((self.x, self.y), header, url)
        entries = [header[key] for key in wanted_names((self.x, self.y))]
        usable = all(e["dtype"] in _DTYPES and e["shape"] for e in entries)
        if not usable or len({e["shape"][0] for e in entries}) != 1:
            return super().look(store, name)  # which says what is wrong, if it is
        empty = {key: _without_rows(header[key]) for key in header}
        x, y = picked(self.x, empty), picked(self.y, empty)
        return header_facts(entries[0]["shape"][0], x, y)


def _without_rows(entry: dict[str, Any]) -> np.ndarray:
    return np.empty((0, *entry["shape"][1:]), _DTYPES.get(entry["dtype"]))


def _header(store: Store, name: str) -> dict[str, Any]:
    """What the file says of each of its tensors."""
    length = int.from_bytes(store.read(name, 0, _LENGTH_BYTES), "little")
    if length > _LARGEST_HEADER_BYTES:
        raise ValueError(f"its header would have {length} bytes")
    content = store.read(name, _LENGTH_BYTES, _LENGTH_BYTES + length)
    header: dict[str, Any] = json.loads(content)
    header.pop("__metadata__", None)
    return header
