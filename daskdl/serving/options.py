"""What a predictor may be asked to be."""

import math
from numbers import Real

from daskdl.errors import OptionError


def check_options(
    replicas: int, batch_limit: int, wait_ms: float, queue_limit: int
) -> None:
    """Refuse options of a predictor that are not allowed, see there.

    Raises:
        OptionError: Naming the first of them.

    Example:
        >>> check_options(2, 32, -1.0, 1024)
        Traceback (most recent call last):
        daskdl.errors.OptionError: wait_ms must be >= 0 and finite, got -1.0
    """
    for name, value in (("replicas", replicas), ("batch_limit", batch_limit)):
        if type(value) is not int or value < 1:
            raise OptionError(f"{name} must be an integer >= 1, got {value!r}")
    if not isinstance(wait_ms, Real) or not 0 <= wait_ms < math.inf:
        raise OptionError(f"wait_ms must be >= 0 and finite, got {wait_ms!r}")
    if type(queue_limit) is not int or queue_limit < batch_limit:
        raise OptionError(
            f"queue_limit must be an integer >= batch_limit={batch_limit}, as one call "
            f"may have so many rows, got {queue_limit!r}"
        )
