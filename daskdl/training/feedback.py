"""What rounding has left at one replica, and is sent with the next mean."""

from daskdl.channel.protocol import Arrays


class Feedback:
    """The residual of a replica that sends rounded sums: error feedback.

    It changes with each sum that the replica has passed on, but only if a mean came
    of that, which the replica may learn at the next meeting: else all is sent again,
    rounded from the residual that there was before.

    Attributes:
        residual: By name; empty if nothing is left. Not changed in place.

    Example:
        >>> import numpy as np
        >>> feedback = Feedback()
        >>> feedback.propose(7, {"a": np.array([0.25])})
        >>> feedback.settle_(latest=6)
        >>> feedback.residual
        {}
        >>> feedback.propose(8, {"a": np.array([0.25])})
        >>> feedback.settle_(latest=8)
        >>> feedback.residual
        {'a': array([0.25])}

    Source:
        Seide and others, "1-Bit Stochastic Gradient Descent", Interspeech 2014.
    """

    residual: Arrays

    def __init__(self) -> None:
        self.residual = {}
        self._number = -1
        self._proposed: Arrays | None = None

    def propose(self, number: int, residual: Arrays) -> None:
        """Say what is left here if a mean is made.

        Args:
            number: Of the mean.
            residual: Takes the place of the present one; not changed any more.
        """
        self._number, self._proposed = number, residual

    def settle_(self, latest: int) -> None:
        """Take over what was proposed for a mean that exists; forget it otherwise.

        Args:
            latest: Number of the last mean that anybody has.
        """
        if self._proposed is not None and self._number == latest:
            self.residual = self._proposed
        self._proposed = None

    def restore_(self, residual: Arrays) -> None:
        """Go on with a residual, of this replica or of several, added up."""
        self.residual, self._proposed = residual, None
