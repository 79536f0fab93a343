"""The bounds of queues are of memory, not of frames alone."""

import gc
import tracemalloc

import pytest

from benchmarks import queues

BOUND = 2**20


@pytest.mark.parametrize("name", queues.QUEUES)
def test_a_full_queue_takes_what_it_counts(name):
    make, fill, source, bound = queues.QUEUES[name]
    items = source(1)
    next(items)
    gc.collect()

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        queue = make(BOUND)
        fill(queue, items, BOUND)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()

    assert bound >= BOUND
    assert 0.9 * BOUND < queue.nbytes < 1.1 * BOUND
    assert queue.nbytes / 1.4 < taken < 1.2 * queue.nbytes
