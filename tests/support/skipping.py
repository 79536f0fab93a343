"""Tests that need a network of namespaces, where there can be none."""

import pytest

from benchmarks.namespaces import unavailable


def skip_if_unavailable():
    """Skip the test where there cannot be such a network, and say why."""
    if reason := unavailable():
        pytest.skip(f"no network namespaces: {reason}")
