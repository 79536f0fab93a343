"""Tables of predictions: a Parquet file for each partition, with its index."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask.delayed import Delayed
from typing_extensions import override

from daskdl.errors import ModelError
from daskdl.predictions.base import Encoded, Format

_NAME = "prediction"  # of the column of a series, which Parquet needs


@dataclass(frozen=True)
class Tables(Format):
    """A ``dask.dataframe``, or a series of one.

    Attributes:
        empty: The bytes of a Parquet file without rows.
        divisions: The bytes of one whose index has the divisions; None: not known.
        series: Whether it is a series.
        names: Whether the columns have names; else they are 0, 1, ...
    """

    empty: bytes
    divisions: bytes | None
    series: bool
    names: bool

    kind = "tables"
    suffix = "parquet"

    @classmethod
    def of(cls, frame: Any) -> "Tables":
        """The format of the partitions of a ``dask.dataframe`` or a series.

        Raises:
            ModelError: If its columns could not be told when it is read back.
        """
        import pandas

        meta = frame._meta
        divisions = None
        if frame.known_divisions:
            index = pandas.Index(frame.divisions, name=meta.index.name)
            divisions = _parquet(pandas.DataFrame(index=index))
        names = meta.ndim == 1 or all(isinstance(name, str) for name in meta.columns)
        if not names and list(meta.columns) != list(range(len(meta.columns))):
            raise ModelError(
                "columns must have text as names to be written to Parquet, got "
                f"{list(meta.columns)}; give a postprocess that names them so"
            )
        return cls(_parquet(_framed(meta)), divisions, meta.ndim == 1, names)

    @override
    def encoded(self, value: Any) -> Encoded:
        return Encoded(len(value), _parquet(_framed(value)))

    @override
    def decoded(self, content: bytes) -> Any:
        import pandas

        frame = pandas.read_parquet(io.BytesIO(content))
        if self.series:
            return frame[_NAME].rename(None)
        if not self.names:
            frame.columns = pandas.RangeIndex(len(frame.columns))
        return frame

    @override
    def to_json(self) -> dict[str, Any]:
        return {
            "empty": base64.b64encode(self.empty).decode(),
            "divisions": (
                None
                if self.divisions is None
                else base64.b64encode(self.divisions).decode()
            ),
            "series": self.series,
            "names": self.names,
        }

    @override
    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Tables":
        divisions = content["divisions"]
        return cls(
            base64.b64decode(content["empty"]),
            None if divisions is None else base64.b64decode(divisions),
            bool(content["series"]),
            bool(content["names"]),
        )

    @override
    def whole(self, values: Sequence[Any]) -> Any:
        import pandas

        return pandas.concat([v for v in values if len(v)] or values[:1])

    @override
    def lazy(self, parts: Sequence[Delayed], rows: Sequence[int]) -> Any:
        import dask.dataframe
        import pandas

        divisions = None
        if self.divisions is not None:
            divisions = tuple(pandas.read_parquet(io.BytesIO(self.divisions)).index)
        return dask.dataframe.from_delayed(
            list(parts),
            meta=self.decoded(self.empty),
            divisions=divisions,
            verify_meta=False,
        )


def _framed(table: Any) -> Any:
    """A frame whose columns have names, as Parquet needs them."""
    if table.ndim == 1:
        return table.to_frame(_NAME)
    return table.rename(columns=str)


def _parquet(frame: Any) -> bytes:
    content = io.BytesIO()
    frame.to_parquet(content)
    return content.getvalue()
