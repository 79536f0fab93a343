"""What labels are held to, wherever they are loaded."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from daskdl.data import batching
from daskdl.data.arrays import as_numpy
from daskdl.data.batching import Tree
from daskdl.errors import DataError


class ClassRange(NamedTuple):
    """The labels that a classification loss accepts."""

    classes: int  # labels are in [0, classes)
    ignore_index: int  # the one label outside that is accepted


@dataclass(frozen=True)
class LabelCheck:
    """Refuses labels that a loss cannot use.

    Attributes:
        accepted: Of class indices; None: anything but NaN.
    """

    accepted: ClassRange | None = None

    def check(self, y: Tree, of: str = "") -> None:
        """Look at all labels of some rows.

        Args:
            y: Tree of arrays, or None: then there is nothing to look at.
            of: What they are of, for the message; "": all of them.

        Raises:
            DataError: With the first wrong one, and where it is.

        Example:
            >>> import numpy as np
            >>> LabelCheck().check({"a": np.array([0.5, np.nan])}, "part 3")
            Traceback (most recent call last):
            daskdl.errors.DataError: y['a'] of part 3[1] is nan; remove such \
examples, or fill them in
        """
        classes, ignored = self.accepted or (None, None)
        for name, leaf in () if y is None else batching.named(y, "y"):
            check_labels(leaf, classes, f"{name} of {of}" if of else name, ignored)


def check_labels(
    y: np.ndarray | Tensor,
    classes: int | None,
    where: str,
    ignore_index: int | None = None,
) -> None:
    """Refuse labels that no loss can use: NaN, or a class the model does not have.

    Args:
        y: Labels of a data set or of one piece of it.
        classes: Integer labels must be in [0, classes); None if they need not.
        where: What ``y`` is, for the message: an argument or a piece.
        ignore_index: A label that is accepted although it is outside.

    Raises:
        DataError: With the first such label and its index.

    Example:
        >>> check_labels(np.array([0, 1, 2]), 2, "y")
        Traceback (most recent call last):
        daskdl.errors.DataError: y[2] is 2, but the model gives 2 outputs: labels \
must be in [0, 2)
    """
    labels = as_numpy(y)
    if labels.dtype.kind == "f":
        wrong = np.isnan(labels)
        remedy = "; remove such examples, or fill them in"
    elif labels.dtype.kind in "iu" and classes is not None:
        wrong = (labels < 0) | (labels >= classes)
        if ignore_index is not None:
            wrong &= labels != ignore_index
        remedy = f", but the model gives {classes} outputs: labels must be in "
        remedy += f"[0, {classes})"
    else:
        return
    if wrong.any():
        index = np.unravel_index(np.argmax(wrong), wrong.shape)
        shown = ", ".join(str(i) for i in index)
        raise DataError(f"{where}[{shown}] is {labels[index]}{remedy}")
