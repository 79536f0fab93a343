"""A hint where a fit ended before the threshold had found its place."""

import logging

from daskdl.history import Row

logger = logging.getLogger(__name__)

# A threshold that fits sends a hundredth or less. Where half of all entries reach it,
# it is far below what the parameters move by.
DENSE = 0.5


def hint_at_small_threshold(last: Row) -> bool:
    """Say in the log how to begin, if the last epoch was sent in too small quanta.

    What an entry is behind by more than some quanta, residual clipping drops: then a
    fit learns little, and its loss does not tell why.

    Args:
        last: Row of the history.

    Returns:
        Whether there was something to say.

    Example:
        >>> hint_at_small_threshold({"density": 0.004, "clipped": 3.0})
        False
    """
    if last["density"] < DENSE or not last["clipped"] > 0:
        return False
    logger.warning(
        "in the last epoch %.0f %% of all entries were sent, in quanta of %.1e that "
        "are too small for the steps of this model, and a mass of %.1e was dropped by "
        "clipping; begin with a larger threshold, as AdaptiveThreshold(initial=1e-2), "
        "or keep the residual, residual=KeepResidual()",
        100 * last["density"],
        last["threshold"],
        last["clipped"],
    )
    return True
