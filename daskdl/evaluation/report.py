"""The result of an evaluation: a dict that prints as a report and draws figures.

Each metric set has a section of text, tables and figures; text and HTML are rendered
from the same blocks. This module imports neither torch nor Dask; pandas and matplotlib
are optional.
"""

import html
import itertools
import json
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from typing_extensions import override

from daskdl.errors import OptionError, count_of
from daskdl.observe import plots

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure, SubFigure

Values = Mapping[str, Any]
_COUNTS = ("support", "predicted", "count")


class Text(NamedTuple):
    """A sentence, or a heading (``"h4"``)."""

    text: str
    tag: str = "p"


class TextTable(NamedTuple):
    """A table of right-aligned cells; the first cell of a row is its name."""

    rows: Sequence[Sequence[str]]
    columns: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class Section:
    """Values of one metric set, and their report."""

    kind: str
    values: Values
    blocks: Sequence[Text | TextTable]
    names: tuple[str, ...] = ()  # of classes, labels or columns
    pictures: "Mapping[str, Callable[[SubFigure], None]]" = field(default_factory=dict)

    @property
    def columns(self) -> dict[str, Any]:
        """The values with one number per name, by name of the value."""
        if not self.names:  # the user's metrics may be called anything
            return {}
        return {
            name: value
            for name, value in self.values.items()
            if name in _COUNTS
            or (name.endswith(("_per_class", "_per_column")) and value.ndim == 1)
        }


def decimals(value: float) -> str:
    """Format a number with 4 decimals, NaN as "-".

    Example:
        >>> decimals(0.5), decimals(float("nan")), decimals(1e-7), decimals(123456.0)
        ('0.5000', '-', '1.0000e-07', '123456.0000')
    """
    if math.isnan(value):
        return "-"
    size = abs(value)
    return f"{value:.4f}" if size == 0 or 1e-3 <= size < 1e6 else f"{value:.4e}"


def as_text(blocks: Iterable[Text | TextTable]) -> str:
    """Render a report for a terminal."""
    return "\n\n".join(
        _one_line(block.text) if isinstance(block, Text) else _text_table(block)
        for block in blocks
    )


def _text_table(table: TextTable) -> str:
    rows = [table.columns, *table.rows] if table.columns else table.rows
    lines = [[_one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        [name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]
        for name, *cells in lines
    )
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _one_line(text: str) -> str:
    """Replace line breaks, tabs and control characters by spaces."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def as_html(blocks: Iterable[Text | TextTable]) -> str:
    """Render a report for a notebook; all text is escaped."""

    def row_html(cells: Sequence[str], tag: str) -> str:
        style = ' style="text-align: right"'
        name, *values = map(html.escape, cells)
        tagged = "".join(f"<{tag}{style}>{value}</{tag}>" for value in values)
        return f"<tr><th>{name}</th>{tagged}</tr>"

    def block_html(block: Text | TextTable) -> str:
        if isinstance(block, Text):
            return f"<{block.tag}>{html.escape(block.text)}</{block.tag}>"
        head = row_html(block.columns, "th") if block.columns else ""
        body = "".join(row_html(row, "td") for row in block.rows)
        return f"<table>{head}{body}</table>"

    return f"<div>{''.join(map(block_html, blocks))}</div>"


LIMIT = 20  # most classes in a table or matrix
WORST = 10  # classes in a table if there are more than LIMIT

_AVERAGED = ("precision", "recall", "f1", "roc_auc", "average_precision")
_SCALARS = {
    "exact_match": "exact match",
    "precision": "precision",
    "recall": "recall",
    "specificity": "specificity",
    "f1": "F1",
    "mcc": "MCC",
    "roc_auc": "ROC AUC",
    "average_precision": "average precision",
}
_PER_CLASS = {
    "accuracy_per_class": "accuracy",
    "precision_per_class": "precision",
    "recall_per_class": "recall",
    "f1_per_class": "F1",
    "roc_auc_per_class": "ROC AUC",
    "average_precision_per_class": "avg. prec.",
    "support": "support",
    "predicted": "predicted",
}
_ERRORS = {"mse": "MSE", "mae": "MAE", "rmse": "RMSE", "r2": "R2", "pearson": "Pearson"}


def user_metrics(values: Values) -> Section:
    """Report the user's own metrics by name."""

    def shown(value: Any) -> str:
        real = isinstance(value, numbers.Real)
        integral = isinstance(value, numbers.Integral)
        return decimals(float(value)) if real and not integral else str(value)

    rows = [(name, shown(value)) for name, value in values.items()]
    return Section("own", values, [Text("Metrics", "h4"), TextTable(rows)])


def classification(values: Values, names: tuple[str, ...]) -> Section:
    """Report rates, confusion matrix and curves of class predictions."""
    labels = count_of(values["support"].sum(), "label")
    title = f"Classification: {len(names)} classes, {labels}"
    blocks = _class_blocks(title, values, names, "class", "with labels")
    if len(names) <= LIMIT:
        blocks += _confusion(values, names)
    pictures = _confusion_picture(values, names) | _curve_pictures(values, names)
    return Section("classification", values, blocks, names, pictures)


def binary(values: Values, names: tuple[str, ...]) -> Section:
    """Report rates at a threshold and curves of a binary label."""
    matrix = values["confusion_matrix"]
    counts = matrix.sum(axis=1)
    blocks: list[Text | TextTable] = [
        Text(f"Binary: {counts.sum()} labels, {counts[1]} of them {names[1]}", "h4"),
        _scalar_table(values, averaged=False),
        *(
            Text(f"No label is {name}, so ROC AUC is undefined")
            for name, count in zip(names, counts, strict=True)
            if not count
        ),
        *_confusion(values, names),
    ]
    pictures = _confusion_picture(values, names) | _curve_pictures(values, names[1:])
    return Section("binary", values, blocks, names, pictures)


def multilabel(values: Values, names: tuple[str, ...]) -> Section:
    """Report rates and curves of several labels per row."""
    rows = count_of(values["rows"], "row")
    title = f"Multilabel: {count_of(len(names), 'label')}, {rows}"
    blocks = _class_blocks(title, values, names, "label", "that occur")
    return Section("multilabel", values, blocks, names, _curve_pictures(values, names))


def _scalar_table(values: Values, *, averaged: bool) -> TextTable:
    """Return a table of the single numbers; `averaged`: as means over classes."""
    titles = {"accuracy": "accuracy"}
    titles |= {  # "top_5_accuracy" becomes "top-5 accuracy"
        n: n.replace("_", "-", 1).replace("_", " ") for n in values if "top_" in n
    }
    titles |= _SCALARS
    if averaged:
        titles |= {name: f"{_SCALARS[name]} (macro)" for name in _AVERAGED}
    return TextTable([(titles[n], decimals(values[n])) for n in titles if n in values])


def _class_blocks(
    title: str, values: Values, names: Sequence[str], noun: str, eligible: str
) -> list[Text | TextTable]:
    """Return blocks for classes or labels, which `noun` names.

    A long table is cut to those with the lowest F1 among the `eligible`, which are the
    ones with support.
    """
    blocks: list[Text | TextTable] = [
        Text(title, "h4"),
        _scalar_table(values, averaged=True),
    ]
    support, predicted = values["support"] > 0, values["predicted"] > 0
    chosen = np.arange(len(names))
    if len(names) > LIMIT:
        chosen = np.flatnonzero(support)
        order = np.argsort(values["f1_per_class"][chosen], kind="stable")
        chosen = chosen[order][:WORST]
        plural = "classes" if noun == "class" else "labels"
        blocks.append(
            Text(f"The {WORST} {plural} with the lowest F1 among those {eligible}:")
        )
    columns = {_PER_CLASS[n]: values[n] for n in _PER_CLASS if n in values}
    rows = [
        (
            names[k],
            *(
                str(v[k]) if v.dtype.kind == "i" else decimals(v[k])
                for v in columns.values()
            ),
        )
        for k in chosen.tolist()
    ]
    blocks.append(TextTable(rows, [noun, *columns]))
    unseen = ~support & ~predicted
    remarks = {
        "Never predicted": support & ~predicted,
        "Without labels, so recall is 0": ~support & predicted,
        "Without labels and never predicted, so left out of all means": unseen,
        "ROC AUC is undefined, because all labels are of a single class": (
            np.isnan(values["roc_auc_per_class"]) & ~unseen
        ),
    }
    return [*blocks, *_remarks(remarks, names)]


def _remarks(remarks: Mapping[str, Any], names: Sequence[str]) -> Iterator[Text]:
    """Yield each remark that applies to any name, with these names."""
    for remark, applies in remarks.items():
        affected = [names[k] for k in np.flatnonzero(applies).tolist()]
        omitted = f" and {len(affected) - LIMIT} more" if len(affected) > LIMIT else ""
        if affected:
            yield Text(f"{remark}: {', '.join(affected[:LIMIT])}{omitted}")


def _confusion(values: Values, names: Sequence[str]) -> list[Text | TextTable]:
    rows = [
        (name, *map(str, counts))
        for name, counts in zip(names, values["confusion_matrix"], strict=True)
    ]
    note = Text("Confusion matrix (row: actual, column: predicted):")
    return [note, TextTable(rows, ["", *(plots.short(name, 10) for name in names)])]


def _confusion_picture(values: Values, names: tuple[str, ...]) -> dict[str, Any]:
    matrix = values["confusion_matrix"]
    return {"confusion_matrix": partial(plots.draw_confusion, matrix, names)}


def _curve_pictures(values: Values, names: tuple[str, ...]) -> dict[str, Any]:
    areas = {"roc": "roc_auc", "precision_recall": "average_precision"}
    return {
        kind: partial(
            plots.draw_curves,
            kind,
            values[f"{kind}_curves"],
            np.atleast_1d(values.get(f"{area}_per_class", values[area])),
            names,
        )
        for kind, area in areas.items()
    }


def regression(values: Values, names: tuple[str, ...]) -> Section:
    """Report the errors of each column, and their means."""
    count = values["count"]
    errors = [values[f"{error}_per_column"] for error in _ERRORS]
    rows = [
        (name, *(decimals(error[k]) for error in errors), str(count[k]))
        for k, name in enumerate(names[:LIMIT])
    ]
    if len(names) > 1:
        means = (decimals(values[error]) for error in _ERRORS)
        rows.append(("mean", *means, str(count.sum())))
    columns = f"{len(names)} column" + ("s" if len(names) > 1 else "")
    blocks: list[Text | TextTable] = [
        Text(f"Regression: {columns}, {count.sum()} values", "h4"),
        TextTable(rows, ["column", *_ERRORS.values(), "values"]),
    ]
    if len(names) > LIMIT:
        blocks.append(Text(f"to_pandas() has {len(names) - LIMIT} more columns"))
    remarks = {
        "Without counted values": "mse",
        "R2 is undefined for fewer than 2 values": "r2",
        "Pearson is undefined for constant labels or predictions": "pearson",
    }
    undefined = {
        remark: np.isnan(values[f"{name}_per_column"])
        for remark, name in remarks.items()
    }
    blocks += _remarks(undefined, names)
    return Section("regression", values, blocks, names)


def calibration(values: Values, names: tuple[str, ...]) -> Section:
    """Report calibration errors, and the accuracy of each bin of confidence."""
    bins = [values[f"bin_{name}"] for name in ("count", "confidence", "accuracy")]
    edges = values["bin_edges"]
    rows = [
        (
            f"{low:.3f} to {high:.3f}",
            str(count),
            decimals(confidence),
            decimals(accuracy),
        )
        for (low, high), count, confidence, accuracy in zip(
            itertools.pairwise(edges), *bins, strict=True
        )
    ]
    blocks: list[Text | TextTable] = [
        Text(f"Calibration: {values['bin_count'].sum()} predictions", "h4"),
        TextTable(
            [
                ("expected calibration error", decimals(values["ece"])),
                ("maximum calibration error", decimals(values["mce"])),
            ]
        ),
        TextTable(rows, ["confidence", "count", "mean confidence", "accuracy"]),
    ]
    pictures = {"reliability": partial(plots.draw_reliability, edges, *bins)}
    return Section("calibration", values, blocks, names, pictures)


class Evaluation(dict[str, Any]):
    """A dict of measured values, numbers and numpy arrays, by name.

    An evaluation with metrics prints as a report. If two metric sets have a value of
    the same name, the name in the later set gets a prefix: ``binary_precision``, then
    ``binary_2_precision``, ``binary_3_precision``.

    Args:
        values: Values that belong to no metric set, such as the loss.
        sections: The values of each metric set, and their reports.

    Attributes:
        sections: The values of each metric set, and their reports.

    Example:
        >>> Evaluation({"loss": 0.5})
        {'loss': 0.5}
    """

    sections: tuple[Section, ...]

    def __init__(
        self,
        values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        sections: Sequence[Section] = (),
    ) -> None:
        super().__init__(values)
        self.sections = tuple(sections)
        self._unsectioned = tuple(self)  # names of the values without a section
        for section in self.sections:
            _add_prefixed(self, section, section.values)

    def to_dict(self) -> dict[str, Any]:
        """Return the values as Python numbers, lists and dicts.

        Example:
            >>> Evaluation({"support": np.array([1, 2])}).to_dict()
            {'support': [1, 2]}
        """
        values: dict[str, Any] = _json_values(self)
        return values

    def to_json(self) -> str:
        """Return the values as JSON; NaN and infinity become null.

        Example:
            >>> Evaluation({"roc_auc": float("nan")}).to_json()
            '{"roc_auc": null}'
        """
        return json.dumps(_json_values(self, finite=True), allow_nan=False)

    def to_pandas(
        self, rows: Literal["classes", "all"] | None = None
    ) -> "pd.DataFrame":
        """Return the values as a table.

        Args:
            rows: "classes": a row for each class, label or column of the first metric
                set that has any, with the values of all sets with the same names.
                "all": one row with the single numbers. None: "classes" if possible.

        Raises:
            OptionError: If pandas is not installed, or `rows` is "classes" and the
                evaluation has no classes.
        """
        try:
            import pandas as pd
        except ImportError:
            raise OptionError(
                "to_pandas needs pandas: pip install 'daskdl[dataframe]'"
            ) from None
        if rows not in (None, "classes", "all"):
            raise OptionError(f'rows must be "classes", "all" or None, got {rows!r}')
        tabular = [section for section in self.sections if section.columns]
        if rows == "classes" and not tabular:
            raise OptionError(
                'this evaluation has no classes; use to_pandas(rows="all")'
            )
        if rows == "all" or not tabular:
            return pd.DataFrame([{k: v for k, v in self.items() if np.ndim(v) == 0}])
        columns: dict[str, Any] = {}
        for section in tabular:
            if section.names == tabular[0].names:
                _add_prefixed(columns, section, section.columns)
        return pd.DataFrame(columns, index=pd.Index(tabular[0].names))

    def plot(self, kind: str | None = None) -> "Figure":
        """Draw plots into a new figure, which notebooks show and `savefig` saves.

        Args:
            kind: "confusion_matrix", "roc", "precision_recall" or "reliability". None:
                all plots of this evaluation.

        Raises:
            OptionError: If there is no such plot, or matplotlib is not installed.
        """
        pictures: dict[str, Any] = {}
        for section in self.sections:
            _add_prefixed(pictures, section, section.pictures)
        if not pictures:
            raise OptionError(
                "this evaluation has nothing to plot; evaluate with "
                'metrics="classification", "binary", "multilabel" or "calibration"'
            )
        if kind is not None and kind not in pictures:
            raise OptionError(
                f"kind must be one of this evaluation's plots, "
                f"{', '.join(map(repr, pictures))}, or None for all, got {kind!r}"
            )
        return plots.figure_of(
            [*pictures.values()] if kind is None else [pictures[kind]]
        )

    @override
    def __repr__(self) -> str:
        return as_text(self._blocks()) if self.sections else super().__repr__()

    def _repr_html_(self) -> str | None:
        return as_html(self._blocks()) if self.sections else None

    def _blocks(self) -> Iterator[Text | TextTable]:
        rows = [
            (name, decimals(self[name]))
            for name in self._unsectioned
            if isinstance(self[name], float | int)
        ]
        if rows:
            yield TextTable(rows)
        for section in self.sections:
            yield from section.blocks


def _add_prefixed(into: dict[str, Any], section: Section, values: Values) -> None:
    """Add values; a name that is already used gets the section's kind as a prefix."""
    for name, value in values.items():
        unused, number = name, 1
        while unused in into:
            prefix = section.kind if number == 1 else f"{section.kind}_{number}"
            unused, number = f"{prefix}_{name}", number + 1
        into[unused] = value


def _json_values(value: Any, *, finite: bool = False) -> Any:
    """Convert to numbers, lists and dicts; `finite`: NaN and infinity become None."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
        if not finite:
            return value
    if isinstance(value, dict):
        return {
            str(key): _json_values(item, finite=finite) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_json_values(item, finite=finite) for item in value]
    undefined = finite and isinstance(value, float) and not math.isfinite(value)
    return None if undefined else value
