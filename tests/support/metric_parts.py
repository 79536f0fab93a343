"""Metrics of partitioned data, merged as on a cluster."""

import functools
import itertools

import numpy as np
import torch

from daskdl.evaluation.metric_state import StateMerger, states_of, update_
from daskdl.evaluation.presets import SampleBatch

ROWS = 101  # a prime
# Positions of cuts; labels of most data are sorted.
CUTS = {
    "unequal": [1, 7, 60],
    "masked": [20, 30],  # a part of masked rows only
    "empty": [0, 0, 50, 50, ROWS, ROWS],
    "rows": [*range(1, 15), *range(ROWS - 15, ROWS)],
}


def merged(make, cuts, *columns, order=None, prepared=lambda *columns: columns):
    """Return metrics merged from parts, by default from the last part to the first.

    An empty part has no state.
    """
    merger = StateMerger(make())
    spans = list(enumerate(itertools.pairwise([0, *cuts, len(columns[0])])))
    for part, (start, end) in [spans[i] for i in order or reversed(range(len(spans)))]:
        live = make()
        if start < end:
            update_(live, *prepared(*(values[start:end] for values in columns)))
        merger.add_(part, states_of(live, end - start))
    return merger.merged()


def section_of(metrics, sample, output, y, cuts=()):
    """Return the section of a preset for parts."""

    def prepared(output, y):
        return metrics.prepared(sample, output, y)

    make = functools.partial(metrics.collection, sample)
    merged_metrics = merged(make, cuts, output, y, prepared=prepared)
    return metrics.section(sample, merged_metrics.compute())


def measured(metrics, sample, output, y, cuts=()):
    """Return the values of a preset for parts."""
    return section_of(metrics, sample, output, y, cuts).values


def check_close(values, expected, atol, rtol=0.0):
    """Compare values by name."""
    for name, value in expected.items():
        np.testing.assert_allclose(
            values[name], value, rtol=rtol, atol=atol, err_msg=name
        )


def sample_of(output, y, scale="logits", classes=None, ignored=None):
    """Return the sample of an evaluation."""
    return SampleBatch(output[:2], y[:2], scale, classes, ignored)


def softmax(scores):
    """Softmax over the second axis by numpy, float64."""
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
