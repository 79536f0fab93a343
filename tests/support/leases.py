"""Leases of one epoch, as the tests make them."""

from daskdl.channel.leasing import PartitionSizes, SyncIntervals, SyncPoint


def leases_of(
    kind,
    rows,
    step_rows=1,
    lease_rows=1,
    replicas=(0,),
    seed=None,
    interval_rows=None,
    remaining=None,
):
    """A leasing in its first epoch; the key of each part is its number.

    Args:
        kind: Of the leasing.
        rows: Of each part.
        remaining: Of the epoch; None: all of it.
    """
    keys = tuple(map(str, range(len(rows))))
    sizes = PartitionSizes(tuple(rows), keys, step_rows, lease_rows)
    resumed = None if remaining is None else SyncPoint(0, remaining)
    intervals = SyncIntervals(len(replicas), interval_rows, None, resumed)
    leases = kind(sizes, seed, 0, intervals)
    leases.open(0, replicas)
    return leases


def drained(leases, replica):
    """What a replica gets that asks until there is nothing left for it."""
    return list(iter(lambda: leases.take(replica), None))


def near(*parts):
    """What tells whether a worker holds a part."""
    return lambda key: int(key) in parts
