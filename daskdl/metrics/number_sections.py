"""The reports on regression and on calibration. No torch, no Dask."""

import functools
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from daskdl.metrics.blocks import Block, Facts, Heading, Note, Table, decimals
from daskdl.metrics.class_tables import LIMIT, listed
from daskdl.metrics.reliability_picture import drawn_reliability
from daskdl.metrics.sections import Picture, Section

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
