"""What an evaluation gives back: a dict that can be read, saved and drawn. No Dask."""

import itertools
import json
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from typing_extensions import override

from daskdl.errors import OptionError
from daskdl.metrics.blocks import Block, Facts, as_html, as_text, decimals
from daskdl.metrics.figures import figure_of
from daskdl.metrics.sections import Picture, Section

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Evaluation(dict[str, Any]):
    """Everything that was measured, by name: numbers, and numpy arrays.

    Without metrics it is the dict of loss and accuracy, and prints as one; with
    metrics it prints as a report. Where two sets of metrics have a value of the same
    name, that of the later one is named after its set: ``binary_precision``; of still
    later ones of that kind ``binary_2_precision``, ``binary_3_precision``.

    Args:
        values: Of no set of metrics, as the loss.
        sections: What each set of metrics measured.

    Attributes:
        sections: Likewise.

    Example:
        >>> Evaluation({"loss": 0.5})
        {'loss': 0.5}
    """

    sections: tuple[Section, ...]
    _measured: frozenset[str]  # names of what they have

    def __init__(
        self,
        values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        sections: Sequence[Section] = (),
    ) -> None:
        super().__init__(values)
        self.sections = tuple(sections)
        measured: dict[str, Any] = {}
        for section in self.sections:
            for name, value in section.values.items():
                measured[_free(name, section, {*self, *measured})] = value
        self._measured = frozenset(measured)
        self.update(measured)

    def to_dict(self) -> dict[str, Any]:
        """The values as Python's numbers and lists.

        Example:
            >>> Evaluation({"support": np.array([1, 2])}).to_dict()
            {'support': [1, 2]}
        """
        return {name: _plain(value) for name, value in self.items()}

    def to_json(self) -> str:
        """The values as JSON; what is not defined or infinite is null.

        Example:
            >>> Evaluation({"roc_auc": float("nan")}).to_json()
            '{"roc_auc": null}'
        """
        return json.dumps(_finite(self.to_dict()), allow_nan=False)

    def to_pandas(
        self, rows: Literal["classes", "all"] | None = None
    ) -> "pd.DataFrame":
        """The values as a table.

        Args:
            rows: "classes": one for each class, label or column of the first set of
                metrics that has any, with the values of sets with the same ones; "all":
                one, with the single numbers. None: the first, if there are classes.

        Raises:
            OptionError: If pandas is missing, or there are no classes.
        """
        try:
            import pandas as pd
        except ImportError:
            raise OptionError(
                "to_pandas needs pandas: pip install daskdl[dataframe]"
            ) from None
        if rows not in (None, "classes", "all"):
            raise OptionError(f'rows must be "classes", "all" or None, got {rows!r}')
        columns = self._columns()
        if rows == "classes" and not columns:
            raise OptionError('there are no classes in this evaluation: rows="all"')
        if rows == "all" or not columns:
            numbers = {k: v for k, v in self.items() if np.ndim(v) == 0}
            return pd.DataFrame([numbers])
        names = next(s.names for s in self.sections if s.columns())
        return pd.DataFrame(columns, index=pd.Index(names))

    def _columns(self) -> dict[str, Any]:
        """Of the first section that has any, and of those with the same names."""
        with_some = [s for s in self.sections if s.columns()]
        columns: dict[str, Any] = {}
        for section in with_some:
            if section.names == with_some[0].names:
                for name, values in section.columns().items():
                    columns[_free(name, section, columns)] = values
        return columns

    def plot(self, kind: str | None = None) -> "Figure":
        """Draw what there is.

        The figure is matplotlib's, shown by a notebook as it is, and saved by its
        ``savefig``; nothing global is changed.

        Args:
            kind: "confusion_matrix", "roc", "precision_recall" or "reliability"; None:
                all that this evaluation has.

        Raises:
            OptionError: If there is no such picture, or matplotlib is missing.
        """
        pictures: dict[str, Picture] = {}
        for section in self.sections:
            for name, picture in section.pictures().items():
                pictures[_free(name, section, pictures)] = picture
        if not pictures:
            raise OptionError(
                "there is nothing to draw in this evaluation: evaluate with "
                'metrics="classification", "binary", "multilabel" or "calibration"'
            )
        if kind is not None and kind not in pictures:
            raise OptionError(
                f"kind must be one of {', '.join(map(repr, pictures))}, which this "
                f"evaluation has, or None for all, got {kind!r}"
            )
        return figure_of([*pictures.values()] if kind is None else [pictures[kind]])

    @override
    def __repr__(self) -> str:
        return as_text(self._blocks()) if self.sections else super().__repr__()

    def _repr_html_(self) -> str | None:
        return as_html(self._blocks()) if self.sections else None

    def _blocks(self) -> Iterable[Block]:
        alone = [
            (name, decimals(value))
            for name, value in self.items()
            if name not in self._measured and isinstance(value, float | int)
        ]
        if alone:
            yield Facts(alone)
        for section in self.sections:
            yield from section.blocks()


def _free(name: str, section: Section, taken: Container[str]) -> str:
    """The name; where it is taken, after the section, of which there may be several."""
    after = (f"{section.kind}_{n}_{name}" for n in itertools.count(2))
    names = itertools.chain([name, f"{section.kind}_{name}"], after)
    return next(one for one in names if one not in taken)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return (
        [_plain(item) for item in value] if isinstance(value, list | tuple) else value
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
