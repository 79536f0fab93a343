"""What writes down which rows are trained on, and when blocks of data come and go.

Each process writes into a file of its own, so that what a killed one did is known too.
"""

import json
import os
import signal
import threading
import weakref
from collections import Counter
from pathlib import Path

import dask.array as da
import numpy as np
from torch import nn

from daskdl import Callback
from tests.support.problems import rows

MADE = threading.Condition()
built, live = Counter(), Counter()  # blocks in this process, by the folder of notes


def note(folder, kind, **line):
    """Add a line to the notes of this process."""
    with open(os.path.join(folder, f"{os.getpid()}.{kind}"), "a") as file:
        file.write(json.dumps({"pid": os.getpid(), **line}) + "\n")


def notes(folder, kind):
    """The lines of all processes."""
    texts = [path.read_text() for path in sorted(Path(folder).glob(f"*.{kind}"))]
    return [json.loads(line) for text in texts for line in text.splitlines()]


class TrainedRows(Callback):
    """A loss, for labels that are numbers of rows, and a callback that notes them.

    Args:
        folder: Of the notes.
    """

    def __init__(self, folder):
        self.folder = str(folder)

    def __call__(self, output, numbers):
        self._rows = numbers.tolist()
        return nn.functional.cross_entropy(output, numbers % 4)

    def on_step_end(self, step):
        line = {"epoch": step.epoch, "replica": step.replica, "rows": self._rows}
        note(self.folder, "steps", **line)

    def by_epoch(self):
        """How often each row was trained on, in each epoch."""
        values = {}
        for line in notes(self.folder, "steps"):
            values.setdefault(line["epoch"], Counter()).update(line["rows"])
        return [values[epoch] for epoch in sorted(values)]

    def replicas(self):
        """Those that have trained on anything."""
        return {line["replica"] for line in notes(self.folder, "steps")}


class KillAt(Callback):
    """Kills the worker of replica 1 from inside, after a step; nothing is returned."""

    def __init__(self, number):
        self._number = number

    def on_step_end(self, step):
        if step.replica == 1 and step.number == self._number:
            os.kill(os.getpid(), signal.SIGKILL)


class Watched:
    """Makes the blocks of an array; a line says of each that it came, or went.

    Args:
        folder: Of the notes.
        act: Called with the number of a block before it is made.
    """

    def __init__(self, folder, act=None):
        self.folder = str(folder)
        self._act = act

    def __call__(self, block, block_info):
        number = block_info[None]["chunk-location"][0]
        if self._act is not None:
            self._act(number)
        block = block.copy()  # or it would be a part of what is kept
        with MADE:
            built[self.folder] += 1
            live[self.folder] += 1
            note(self.folder, "made", block=number, live=live[self.folder])
            MADE.notify_all()
        weakref.finalize(block, self._dropped, number).atexit = False
        return block

    def _dropped(self, number):
        with MADE:  # which can be held already: any thread may let go of a block
            live[self.folder] -= 1
            note(self.folder, "dropped", block=number)

    def times(self):
        """How often each block was made."""
        return Counter(line["block"] for line in notes(self.folder, "made"))

    def most(self):
        """How many there were in one process at the same time, at most."""
        return max(line["live"] for line in notes(self.folder, "made"))

    def left(self):
        """How many are still there."""
        return sum(
            len(notes(self.folder, kind)) * sign
            for kind, sign in (("made", 1), ("dropped", -1))
        )


def watched_blocks(watched, count=480, chunk=40):
    """A lazy array of watched blocks, and the numbers of its rows as labels."""
    x, _ = rows(count)
    lazy = da.from_array(x, chunks=(chunk, x.shape[1]))
    lazy = lazy.map_blocks(watched, meta=x[:0])
    return lazy, da.from_array(np.arange(count), chunks=chunk)
