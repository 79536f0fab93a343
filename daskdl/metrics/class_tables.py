"""Tables and notes on classes, and on labels that are there or not. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskdl.metrics.blocks import Facts, Note, Table, decimals

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
