"""The report on classes, and on labels that are there or not. No torch, no Dask."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from typing_extensions import override

from daskdl.metrics.blocks import Block, Heading, Note
from daskdl.metrics.class_tables import (
    LIMIT,
    PER_CLASS,
    WORST,
    confusion,
    facts,
    notes,
    per_class,
)
from daskdl.metrics.confusion_picture import drawn_confusion
from daskdl.metrics.curve_picture import drawn_curves
from daskdl.metrics.sections import Picture, Section


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
