"""Which columns of a table are features, and which are labels."""

from collections.abc import Sequence
from typing import NamedTuple

from daskdl.data.formats.classes import listed
from daskdl.errors import DataError

Column = str | int  # its name, or its index from 0 or from the end


class Chosen(NamedTuple):
    """Indices of columns."""

    features: list[int]
    labels: list[int]  # empty: there are none


def chosen(
    names: Sequence[str],
    features: Sequence[Column] | None,
    label: Column | Sequence[Column] | None,
    url: str,
) -> Chosen:
    """Find the columns of a file that the user means.

    Args:
        names: Of all columns.
        features: Those of x; None: all that are no labels.
        label: That of y, or those of y; None: there are no labels.
        url: Of the file, for messages.

    Raises:
        DataError: If a column is not there, is meant twice, or if none is left for x.

    Example:
        >>> chosen(["a", "b", "c"], None, "b", "x.csv")
        Chosen(features=[0, 2], labels=[1])
        >>> chosen(["a", "b"], None, "d", "x.csv")
        Traceback (most recent call last):
        daskdl.errors.DataError: label 'd' is not a column of x.csv; it has 'a', 'b'
    """
    given = [] if label is None else [label] if isinstance(label, str | int) else label
    labels = [_index(names, column, "label", url) for column in given]
    if features is None:
        wanted = [i for i in range(len(names)) if i not in labels]
    else:
        wanted = [_index(names, column, "feature", url) for column in features]
    twice = {i for i in labels if i in wanted or labels.count(i) > 1}
    if twice:
        shown = names[min(twice)]
        raise DataError(f"label {shown!r} of {url} must be meant once, and not in x")
    if not wanted:
        raise DataError(f"{url} has no columns for x, only {listed(names)}")
    return Chosen(wanted, labels)


def _index(names: Sequence[str], column: Column, what: str, url: str) -> int:
    if isinstance(column, str) and names.count(column) == 1:
        return names.index(column)
    if isinstance(column, int) and -len(names) <= column < len(names):
        return column % len(names)
    problem = "the name of several columns" if column in names else "not a column"
    raise DataError(f"{what} {column!r} is {problem} of {url}; it has {listed(names)}")
