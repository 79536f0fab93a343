"""What labels are held to, wherever they are loaded."""

from dataclasses import dataclass

from daskdl.data import trees
from daskdl.data.arrays import check_labels
from daskdl.data.rehearsal import ClassRange
from daskdl.data.trees import Tree


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
        for name, leaf in () if y is None else trees.named(y, "y"):
            check_labels(leaf, classes, f"{name} of {of}" if of else name, ignored)
