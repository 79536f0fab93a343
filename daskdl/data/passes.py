"""One pass over all parts of a source: a function is called where each part is.

For what is done once, beside training: to count, to check, to export.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

from distributed import Client, Future, as_completed, default_client

from daskdl.data.futures import new_key, release, workers_of
from daskdl.data.scattering import scatter
from daskdl.data.source import Source
from daskdl.packed import Packed
from daskdl.timeouts import Timeouts

T = TypeVar("T")

# Enough that no thread of a worker waits for the client, few enough that what is not
# begun costs nothing.
TASKS_PER_THREAD = 2


def each_part(
    source: Source,
    function: Callable[[Source, int], T],
    client: Client | Literal[False] | None = None,
    *,
    parts: Iterable[int] | None = None,
) -> Iterator[tuple[int, T]]:
    """Call a function once for each part, and yield what it returns as it comes.

    Args:
        source: What the parts are of.
        function: Of the source, as it is where it is called, and the number of a part.
            What it raises comes out here.
        client: Synchronous: one Dask task for each part. None: the default client, if
            there is one. False: in this process, where data in memory are gone
            through in any case.
        parts: Numbers; None: all.

    Yields:
        Pairs (part, result), in any order.
    """
    numbers = iter(range(source.parts) if parts is None else parts)
    found = None if source.here or client is False else client or _default()
    if found is None:
        for part in numbers:
            yield part, function(source, part)
        return
    yield from _on_workers(source, function, found, numbers)


def _on_workers(
    source: Source,
    function: Callable[[Source, int], T],
    client: Client,
    numbers: Iterator[int],
) -> Iterator[tuple[int, T]]:
    bound = Timeouts.from_config().bound("data")
    names = new_key("source"), new_key("function")
    packed = Packed(source, "X"), Packed(function, "function")
    values = dict(zip(names, packed, strict=True))
    what = f"what is to be done ({sum(p.payload.nbytes for p in packed)} bytes)"
    sent = scatter(client, values, workers_of(client), bound, what)
    running: dict[Any, int] = {}
    with contextlib.ExitStack() as ending:
        ending.callback(lambda: release(list(running)))
        ending.callback(lambda: release(sent.values()))

        def begin(part: int) -> Any:
            held = [Future(key, client) for key in source.needs(part)]
            task = (_apply, *sent.values(), part, source.needs(part), held)
            future = client.submit(*task, key=f"{new_key('pass')}-{part}", pure=False)
            running[future] = part
            return future

        most = TASKS_PER_THREAD * max(sum(client.nthreads().values()), 1)
        coming = as_completed(loop=client.loop)
        for _, part in zip(range(most), numbers, strict=False):
            coming.add(begin(part))
        for future in coming:
            result = future.result()
            part = running.pop(future)
            future.release()
            following = next(numbers, None)
            if following is not None:
                coming.add(begin(following))
            yield part, result


def _apply(
    source: Packed[Source],
    function: Packed[Callable[[Source, int], T]],
    part: int,
    keys: tuple[str, ...],
    values: list[Any],
) -> T:
    """The task behind a pass."""
    held = dict(zip(keys, values, strict=True))
    return function.shared()(source.shared().holding(held), part)


def _default() -> Client | None:
    try:
        return default_client()
    except ValueError:  # Dask's way to say that there is none
        return None
