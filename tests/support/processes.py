"""What needs a process of its own, in one that need not import everything anew."""

from concurrent.futures import ProcessPoolExecutor

from distributed.utils import get_mp_context

WITHIN_S = 100.0


def in_a_fork(function, *arguments):
    """What a function returns in a new process, which has imported torch and daskdl.

    It is a fork of that from which workers are forked, not of this one.
    """
    with ProcessPoolExecutor(1, get_mp_context()) as pool:
        return pool.submit(function, *arguments).result(WITHIN_S)
