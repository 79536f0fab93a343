"""Measure parts as a cluster does, and cut data into such parts."""

import functools
import itertools

import numpy as np
import torch

from daskdl.evaluation.metric_state import StateMerger, states_of, update_
from daskdl.metrics import SampleBatch

ROWS = 101  # a prime
# Where data are cut, by what that makes of parts; labels of most data are sorted.
CUTS = {
    "unequal": [1, 7, 60],
    "masked": [20, 30],  # rows of which nothing counts, where labels are masked
    "empty": [0, 0, 50, 50, ROWS, ROWS],
    "rows": [*range(1, 15), *range(ROWS - 15, ROWS)],
}


def merged(make, cuts, *given, order=None, prepared=lambda *given: given):
    """Metrics that have seen parts apart; the last part comes first, if not told.

    An empty part has no state.
    """
    merger = StateMerger(make())
    spans = list(enumerate(itertools.pairwise([0, *cuts, len(given[0])])))
    for part, (start, end) in [spans[i] for i in order or reversed(range(len(spans)))]:
        live = make()
        if start < end:
            update_(live, *prepared(*(values[start:end] for values in given)))
        merger.add_(part, states_of(live, end - start))
    return merger.merged()


def section_of(metrics, sample, output, y, cuts=()):
    """The report of a set of metrics on parts."""

    def prepared(output, y):
        return metrics.prepared(sample, output, y)

    make = functools.partial(metrics.collection, sample)
    own = merged(make, cuts, output, y, prepared=prepared)
    return metrics.section(sample, own.compute())


def measured(metrics, sample, output, y, cuts=()):
    """The values of that."""
    return section_of(metrics, sample, output, y, cuts).values


def check_close(values, expected, atol, rtol=0.0):
    """All that is expected is there, and the same to rounding."""
    for name, value in expected.items():
        np.testing.assert_allclose(
            values[name], value, rtol=rtol, atol=atol, err_msg=name
        )


def sample_of(output, y, scale="logits", classes=None, ignored=None):
    """The first rows, as an evaluation shows them."""
    return SampleBatch(output[:2], y[:2], scale, classes, ignored)


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
