"""Names of parametrized tests."""

import re


def shown(value):
    """As `repr`, and the same in each process that collects the tests."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))
