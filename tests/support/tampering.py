"""What is done to files that are to be loaded, and what is watched meanwhile."""

import copy
import os
import sys
import threading

WRONG = [None, True, -1, 2**70, 1.5, 1e308, "x", "../../x", [], {}, [[]], {"x": []}]


class Watch:
    """What this thread does that loading never does; there is one hook.

    Other threads have their own affairs: those of clusters that other tests began.
    """

    ACTIONS = (
        "os.exec",
        "os.fork",
        "os.mkdir",
        "os.posix_spawn",
        "os.remove",
        "os.rename",
        "os.system",
        "pickle.find_class",
        "socket.connect",
        "subprocess.Popen",
    )

    def __init__(self):
        self.watching = None
        self.seen = []
        sys.addaudithook(self.note)

    def note(self, event, arguments):
        if self.watching != threading.get_ident():
            return
        writes = event == "open" and set(str(arguments[1])) & set("wax+")
        if event in self.ACTIONS or writes:
            self.seen.append((event, arguments))


def flipped(content, generator):
    changed = bytearray(content)
    changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def places(value, path=()):
    """Paths to everything in some JSON."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from places(inner, (*path, i))


def replaced(index, path, wrong):
    changed = copy.deepcopy(index)
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = wrong
    return changed


class Bomb:
    """Pickled, it is a call that leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)
