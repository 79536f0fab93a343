"""What a report is made of, and how that is written as text and as HTML. No torch.

What one set of metrics measured, as a part of an evaluation. No torch, no Dask.

Pictures put together to a figure, without matplotlib's global state. No torch.

Tables and notes on classes, and on labels that are there or not. No torch.

The report on classes, and on labels that are there or not. No torch, no Dask.

The reports on regression and on calibration. No torch, no Dask.

What an evaluation gives back: a dict that can be read, saved and drawn. No Dask.
"""

import functools
import html
import itertools
import json
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from daskdl.errors import OptionError
from daskdl.evaluation.plots import (
    drawn_confusion,
    drawn_curves,
    drawn_reliability,
)

_STYLE = "text-align: right"


class Heading(NamedTuple):
    """The title of a section."""

    text: str


class Facts(NamedTuple):
    """Single numbers, each with its name."""

    rows: Sequence[tuple[str, str]]


class Table(NamedTuple):
    """Columns of numbers, right-aligned; the first cell of a row is its name."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Note(NamedTuple):
    """A sentence."""

    text: str


Block = Heading | Facts | Table | Note


def decimals(value: float) -> str:
    """A number with 4 decimals; "-" for one that is not defined.

    Large and tiny ones have 4 digits after the first instead.

    Example:
        >>> decimals(0.5), decimals(float("nan")), decimals(1e-7), decimals(123456.0)
        ('0.5000', '-', '1.0000e-07', '123456.0000')
    """
    if math.isnan(value):
        return "-"
    size = abs(value)
    return f"{value:.4f}" if size == 0 or 1e-3 <= size < 1e6 else f"{value:.4e}"


def as_text(blocks: Iterable[Block]) -> str:
    """Write a report for a terminal.

    Example:
        >>> print(as_text([Heading("Errors"), Facts([("MSE", "0.5000")])]))
        Errors
        <BLANKLINE>
        MSE  0.5000
    """
    return "\n\n".join(_text_of(block) for block in blocks)


def as_html(blocks: Iterable[Block]) -> str:
    """Write a report for a notebook; every name is escaped.

    Example:
        >>> as_html([Note("<b>")])
        '<div><p>&lt;b&gt;</p></div>'
    """
    return f"<div>{''.join(_html_of(block) for block in blocks)}</div>"


def _text_of(block: Block) -> str:
    if isinstance(block, Heading | Note):
        return _one_line(block.text)
    if isinstance(block, Facts):
        return _aligned(block.rows)
    return _aligned([block.columns, *block.rows])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Cells below each other: the first of a row to the left, others to the right."""
    lines = [[_one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        [name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]
        for name, *cells in lines
    )
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _one_line(text: str) -> str:
    """Without line breaks, tabs and what a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _html_of(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h4>{html.escape(block.text)}</h4>"
    if isinstance(block, Note):
        return f"<p>{html.escape(block.text)}</p>"
    if isinstance(block, Facts):
        return f"<table>{_html_rows(block.rows)}</table>"
    head = "".join(f'<th style="{_STYLE}">{html.escape(c)}</th>' for c in block.columns)
    return f"<table><tr>{head}</tr>{_html_rows(block.rows)}</table>"


def _html_rows(rows: Sequence[Sequence[str]]) -> str:
    return "".join(
        f"<tr><th>{html.escape(name)}</th>"
        + "".join(f'<td style="{_STYLE}">{html.escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for name, *cells in rows
    )


if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

Picture = Callable[["SubFigure"], None]  # draws on it


@dataclass(frozen=True, eq=False)
class Section(ABC):
    """Values of one set of metrics, and how they are shown.

    Attributes:
        values: Numbers and arrays, by the names that the user sees.
        names: What rows of arrays are: classes, labels or columns; () if nothing is.
    """

    values: Mapping[str, Any]
    names: tuple[str, ...] = ()

    @property
    @abstractmethod
    def kind(self) -> str:
        """One word, which sets this section apart from others."""

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Make the report of this section."""

    def columns(self) -> dict[str, Any]:
        """What there is of each of `names`, by the names of values."""
        return {}

    def pictures(self) -> dict[str, Picture]:
        """What can be drawn, by kind."""
        return {}


class PlainSection(Section):
    """Numbers by name, of metrics that only the user knows."""

    @property
    @override
    def kind(self) -> str:
        return "own"

    @override
    def blocks(self) -> Iterator[Block]:
        yield Heading("Metrics")
        yield Facts([(name, _shown(value)) for name, value in self.values.items()])


def _shown(value: Any) -> str:
    if isinstance(value, numbers.Integral) or not isinstance(value, numbers.Real):
        return str(value)
    return decimals(float(value))


if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 6.0, 4.5  # of one picture, inches
_COLUMNS = 2


def figure_of(pictures: Sequence[Picture]) -> "Figure":
    """Draw pictures beside and below each other.

    Args:
        pictures: One or more.

    Raises:
        OptionError: If matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError("plot needs matplotlib: pip install daskdl[plots]") from None
    columns = min(len(pictures), _COLUMNS)
    rows = -(-len(pictures) // columns)
    figure = Figure(
        figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained", dpi=100
    )
    FigureCanvasAgg(figure)
    parts = figure.subfigures(rows, columns, squeeze=False).flatten()
    for picture, part in zip(pictures, parts, strict=False):
        picture(part)
    return figure


LIMIT = 20  # classes in a table or matrix; beyond, nobody reads them
WORST = 10  # of more classes, these are shown
_LETTERS = 10  # of a class name above a column of the confusion matrix

SCALARS = {
    "accuracy": "accuracy",
    "exact_match": "exact match",
    "precision": "precision",
    "recall": "recall",
    "specificity": "specificity",
    "f1": "F1",
    "mcc": "MCC",
    "roc_auc": "ROC AUC",
    "average_precision": "average precision",
}
AVERAGED = ("precision", "recall", "f1", "roc_auc", "average_precision")
PER_CLASS = {
    "accuracy_per_class": "accuracy",
    "precision_per_class": "precision",
    "recall_per_class": "recall",
    "f1_per_class": "F1",
    "roc_auc_per_class": "ROC AUC",
    "average_precision_per_class": "avg. prec.",
    "support": "support",
    "predicted": "predicted",
}

Values = Mapping[str, Any]


def facts(values: Values, averaged: bool) -> Facts:
    """Single numbers that there are, in the order of a report.

    Args:
        values: Of a section.
        averaged: Whether some of them are means over classes.
    """
    shown = dict(SCALARS)
    if averaged:
        shown |= {name: f"{SCALARS[name]} (macro)" for name in AVERAGED}
    top = [n for n in values if n.startswith("top_")]
    names = ["accuracy", *top, *(n for n in shown if n != "accuracy")]
    rows = [
        (shown.get(name, _top(name)), decimals(values[name]))
        for name in names
        if name in values
    ]
    return Facts(rows)


def per_class(values: Values, names: Sequence[str], corner: str) -> Table:
    """One row for each class; of very many, for those with the lowest F1.

    Args:
        values: Of a section.
        names: Of its classes.
        corner: What they are.
    """
    columns = {PER_CLASS[n]: values[n] for n in PER_CLASS if n in values}
    chosen = range(len(names)) if len(names) <= LIMIT else worst(values)
    rows = [(names[k], *(_cell(v[k]) for v in columns.values())) for k in chosen]
    return Table([corner, *columns], rows)


def worst(values: Values) -> list[int]:
    """Classes with the lowest F1 of those that have labels."""
    labelled = np.flatnonzero(values["support"])
    order = np.argsort(values["f1_per_class"][labelled], kind="stable")
    return [int(k) for k in labelled[order][:WORST]]


def confusion(confusion_CC: NDArray[np.int64], names: Sequence[str]) -> Table:
    """Rows are the labels, columns what was predicted."""
    short = [n if len(n) <= _LETTERS else f"{n[: _LETTERS - 1]}…" for n in names]
    rows = [
        (name, *(str(n) for n in row))
        for name, row in zip(names, confusion_CC, strict=True)
    ]
    return Table(["", *short], rows)


def notes(values: Values, names: Sequence[str]) -> Iterator[Note]:
    """Classes whose numbers mean less than they look like."""
    labelled, predicted = values["support"] > 0, values["predicted"] > 0
    unseen = ~labelled & ~predicted
    groups = {
        "Never predicted": labelled & ~predicted,
        "Without a label, so that recall is 0": ~labelled & predicted,
        "Without a label and never predicted, left out of every mean": unseen,
        "ROC AUC is not defined, for there is one class only": (
            np.isnan(values["roc_auc_per_class"]) & ~unseen
        ),
    }
    for text, chosen in groups.items():
        if chosen.any():
            yield Note(
                f"{text}: {listed([names[k] for k in np.flatnonzero(chosen).tolist()])}"
            )


def listed(names: Sequence[str]) -> str:
    """Names after each other, not too many.

    Example:
        >>> listed(["a", "b"])
        'a, b'
    """
    shown = ", ".join(names[:LIMIT])
    return shown if len(names) <= LIMIT else f"{shown} and {len(names) - LIMIT} more"


def _top(name: str) -> str:
    """The number in "top_5_accuracy" is that of the classes it allows."""
    return name.replace("_", "-", 1).replace("_", " ")


def _cell(value: Any) -> str:
    return str(value) if isinstance(value, np.integer) else decimals(float(value))


class ClassSection(Section):
    """Rates, confusion matrix and curves of classes, of which each row has one."""

    @property
    @override
    def kind(self) -> str:
        return "classification"

    @override
    def blocks(self) -> Iterator[Block]:
        labels = self.values["support"].sum()
        yield Heading(f"Classification: {len(self.names)} classes, {labels} labels")
        yield facts(self.values, averaged=True)
        if len(self.names) > LIMIT:
            yield Note(f"The {WORST} classes with the lowest F1, of those with labels:")
        yield per_class(self.values, self.names, "class")
        yield from notes(self.values, self.names)
        if len(self.names) <= LIMIT:
            yield Note("Confusion matrix (row: actual, column: predicted):")
            yield confusion(self.values["confusion_matrix"], self.names)

    @override
    def columns(self) -> dict[str, Any]:
        return {name: self.values[name] for name in PER_CLASS if name in self.values}

    @override
    def pictures(self) -> dict[str, Picture]:
        return {**confusion_picture(self), **curve_pictures(self)}


class BinarySection(ClassSection):
    """Rates at a threshold and curves, of something that is there or not."""

    @property
    @override
    def kind(self) -> str:
        return "binary"

    @override
    def blocks(self) -> Iterator[Block]:
        (tn, fp), (fn, tp) = self.values["confusion_matrix"]
        labels, positive = tn + fp + fn + tp, self.names[1]
        yield Heading(f"Binary: {labels} labels, {fn + tp} of them {positive}")
        yield facts(self.values, averaged=False)
        yield from self._undefined()
        yield Note("Confusion matrix (row: actual, column: predicted):")
        yield confusion(self.values["confusion_matrix"], self.names)

    def _undefined(self) -> Iterator[Note]:
        actual = self.values["confusion_matrix"].sum(axis=1)
        for name, count in zip(self.names, actual, strict=True):
            if not count:
                yield Note(f"No label is {name}: ROC AUC is not defined")

    @override
    def columns(self) -> dict[str, Any]:
        return {}

    @override
    def pictures(self) -> dict[str, Picture]:
        return {**confusion_picture(self), **curve_pictures(self, self.names[1:])}


class LabelSection(ClassSection):
    """Rates and curves of labels, of which a row may have any number."""

    @property
    @override
    def kind(self) -> str:
        return "multilabel"

    @override
    def blocks(self) -> Iterator[Block]:
        yield Heading(
            f"Multilabel: {len(self.names)} labels, {self.values['rows']} rows"
        )
        yield facts(self.values, averaged=True)
        if len(self.names) > LIMIT:
            yield Note(f"The {WORST} labels with the lowest F1, of those that occur:")
        yield per_class(self.values, self.names, "label")
        yield from notes(self.values, self.names)

    @override
    def pictures(self) -> dict[str, Picture]:
        return curve_pictures(self)


def confusion_picture(section: Section) -> dict[str, Picture]:
    """The picture of a section's confusion matrix."""
    matrix = section.values["confusion_matrix"]
    drawn = functools.partial(drawn_confusion, matrix, section.names)
    return {"confusion_matrix": drawn}


def curve_pictures(
    section: Section, names: tuple[str, ...] | None = None
) -> dict[str, Picture]:
    """The pictures of a section's curves.

    Args:
        section: Whose values.
        names: Of the curves; None: those of the section.
    """
    names = section.names if names is None else names
    values = section.values
    areas = {"roc": "roc_auc", "precision_recall": "average_precision"}
    drawn = {
        kind: functools.partial(
            drawn_curves,
            kind,
            values[f"{kind}_curves"],
            np.atleast_1d(values.get(f"{area}_per_class", values[area])),
            names,
        )
        for kind, area in areas.items()
    }
    return dict(drawn)


ERRORS = {"mse": "MSE", "mae": "MAE", "rmse": "RMSE", "r2": "R2", "pearson": "Pearson"}


class RegressionSection(Section):
    """Errors of each column, and their means."""

    @property
    @override
    def kind(self) -> str:
        return "regression"

    @override
    def blocks(self) -> Iterator[Block]:
        columns, count = self.values["count"], len(self.names)
        yield Heading(f"Regression: {_plural(count, 'column')}, {columns.sum()} values")
        yield Table(["column", *ERRORS.values(), "values"], list(self._rows()))
        if count > LIMIT:
            yield Note(f"{count - LIMIT} more columns are in to_pandas()")
        for name, text in _UNDEFINED.items():
            missing = [
                column
                for column, value in zip(
                    self.names, self.values[f"{name}_per_column"], strict=True
                )
                if value != value  # NaN
            ]
            if missing:
                yield Note(f"{text}: {listed(missing)}")

    def _rows(self) -> Iterator[tuple[str, ...]]:
        count = self.values["count"]
        for k, name in enumerate(self.names[:LIMIT]):
            each = (decimals(self.values[f"{e}_per_column"][k]) for e in ERRORS)
            yield (name, *each, str(count[k]))
        if len(self.names) > 1:
            mean = (decimals(self.values[error]) for error in ERRORS)
            yield ("mean", *mean, str(count.sum()))

    @override
    def columns(self) -> dict[str, Any]:
        names = [*(f"{error}_per_column" for error in ERRORS), "count"]
        return {name: self.values[name] for name in names}


_UNDEFINED = {
    "mse": "Without a value that counts",
    "r2": "R2 is not defined with fewer than 2 values",
    "pearson": "Pearson is not defined where labels or predictions do not vary",
}


class CalibrationSection(Section):
    """How often what is said with a confidence is right."""

    @property
    @override
    def kind(self) -> str:
        return "calibration"

    @override
    def blocks(self) -> Iterator[Block]:
        rows = self.values["bin_count"].sum()
        yield Heading(f"Calibration: {rows} predictions")
        yield Facts(
            [
                ("expected calibration error", decimals(self.values["ece"])),
                ("largest calibration error", decimals(self.values["mce"])),
            ]
        )
        yield Table(
            ["confidence", "count", "mean confidence", "accuracy"], list(self._bins())
        )

    def _bins(self) -> Iterator[tuple[str, ...]]:
        edges = self.values["bin_edges"]
        for k, count in enumerate(self.values["bin_count"]):
            confidence = decimals(self.values["bin_confidence"][k])
            accuracy = decimals(self.values["bin_accuracy"][k])
            span = f"{edges[k]:.3f} to {edges[k + 1]:.3f}"
            yield (span, str(count), confidence, accuracy)

    @override
    def columns(self) -> dict[str, Any]:
        each = self.values.get("ece_per_class")
        return {} if each is None else {"ece_per_class": each}

    @override
    def pictures(self) -> dict[str, Picture]:
        drawn = functools.partial(
            drawn_reliability,
            self.values["bin_edges"],
            self.values["bin_count"],
            self.values["bin_confidence"],
            self.values["bin_accuracy"],
        )
        return {"reliability": drawn}


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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
