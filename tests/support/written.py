"""Checkpoints written by hand."""

import torch

from daskdl.saving.checkpoints import COMMON, Part, Stamp, of_replica


def write_part(part, stamp, said, state):
    part.write(part.copied(stamp, said, state))


def put(series, number, members=(0, 1), origin="fit", run="run", **said):
    """Write a whole checkpoint.

    Args:
        said: Of the common part, in place of what is said otherwise.
    """
    stamp, folder = Stamp(origin, run, number), series.folder(number)
    for replica in members:
        put_part(series, stamp, replica)
    said = {"members": list(members), "count": number, "rows": [], **said}
    write_part(Part(folder, COMMON), stamp, said, {"shared": torch.zeros(2)})
    return stamp


def put_part(series, stamp, replica):
    state = {"own": torch.full((2,), float(replica))}
    part = Part(series.folder(stamp.number), of_replica(replica))
    write_part(part, stamp, {}, state)


def damaged(store, name):
    """Flip a bit in the middle of a file."""
    content = bytearray(store.read(name))
    content[len(content) // 2] ^= 1
    store.write(name, bytes(content))
