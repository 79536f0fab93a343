"""Measure parts as a cluster does, and cut data into such parts."""

import itertools

import numpy as np
import torch

from daskdl.evaluation.base import Shown
from daskdl.evaluation.metric_state import States, restored, states_of, update_

ROWS = 101  # a prime
# Where data are cut, by what that makes of parts; labels of most data are sorted.
CUTS = {
    "whole": [],
    "unequal": [1, 7, 60],
    "empty": [0, 0, 50, 50, ROWS, ROWS],
    "rows": [*range(1, 15), *range(ROWS - 15, ROWS)],
}


def measured(metrics, shown, output, y, cuts=()):
    """Values, from the states of parts; an empty part has none.

    The last part comes first, as it may on a cluster.
    """
    edges = [0, *cuts, len(y)]
    spans = itertools.pairwise(edges)
    states = States()
    for part, (start, end) in reversed(list(enumerate(spans))):
        live = metrics.collection(shown)
        if start < end:
            prepared = metrics.prepared(shown, output[start:end], y[start:end])
            update_(live, *prepared)
        states += states_of(live, max(end - start, 1), part)
    computed = restored(metrics.collection(shown), states).compute()
    return metrics.values(shown, computed)


def check_close(values, expected, atol, rtol=0.0):
    """All that is expected is there, and the same to rounding."""
    for name, value in expected.items():
        np.testing.assert_allclose(
            values[name], value, rtol=rtol, atol=atol, err_msg=name
        )


def shown_of(output, y, scale="logits", classes=None, ignored=None):
    """The first rows, as an evaluation shows them."""
    return Shown(output[:2], y[:2], scale, classes, ignored)


def section_of(metrics, output, y, **facts):
    """What is told of rows as one part."""
    shown = shown_of(output, y, **facts)
    return metrics.section(shown, measured(metrics, shown, output, y))


def softmax(scores):
    """Numpy's own, over the second axis, float64."""
    scores = scores.numpy().astype(np.float64)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def random(seed, *shape):
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(seed, rows, count):
    """Class indices, sorted, so that most parts have one class only."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, count, (rows,), generator=generator).sort().values
