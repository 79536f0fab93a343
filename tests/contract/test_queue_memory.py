"""The bounds of queues are of memory, not of frames alone."""

import gc
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from benchmarks import queues

BOUND = 2**20
ROOT = Path(__file__).parents[2]


def sizes(name):
    """What a full queue counts, and what Python has allocated for it; bytes."""
    make, fill, source, _ = queues.QUEUES[name]
    items = source(1)
    next(items)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        queue = make(BOUND)
        fill(queue, items, BOUND)
        gc.collect()
        return queue.nbytes, tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def measured():
    """Of all queues, in a process where no other thread allocates anything."""
    own = __name__
    code = f"import json, {own} as t; "
    code += "print(json.dumps({n: t.sizes(n) for n in t.queues.QUEUES}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", queues.QUEUES)
def test_a_full_queue_takes_what_it_counts(name, measured):
    counted, taken = measured[name]

    assert queues.QUEUES[name][-1] >= BOUND
    assert 0.9 * BOUND < counted < 1.1 * BOUND
    assert counted / 1.4 < taken < 1.2 * counted
