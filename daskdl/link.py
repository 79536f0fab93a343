"""What a replica has measured of its way out: plain numbers, no clock, no I/O.

A channel says what has left it (:class:`Drained`), the replica adds how long its steps
take and how large its frames were (:class:`Measured`), and :class:`Link` is the last
few of these. It is a value: :meth:`Link.after` returns the next one.
"""

import math
from statistics import median
from typing import NamedTuple

from daskdl.codec import dense8

# Outcomes that are looked at together. Their median bears two outliers, and has
# followed a change after three.
WINDOW = 5
HEADER_BYTES = 64  # of every frame
LARGER = 1.5  # times the bytes: from there on what they take can be seen


class Drained(NamedTuple):
    """What has left a channel since it was asked before."""

    nbytes: int = 0  # of frames that arrived where they went, each copy counted
    frames: int = 0  # those frames
    requests: int = 0  # that they went in; none among threads, where there is no link
    busy_s: float = 0.0  # while at least one request with frames was under way
    copies: int = 1  # of one published frame that go out from here, or are to


class Measured(NamedTuple):
    """What one exchange took, and what the channel did since the one before."""

    size: int  # parameters
    density: float  # entries sent / parameters, in [0, 1]
    frame_bytes: int  # 0: nothing was published
    dense: bool  # the frame had a number for every parameter
    step_s: float  # computing between two chances to exchange, without waits
    drained: Drained


class Carried(NamedTuple):
    """One time that frames arrived."""

    nbytes: int
    frames: int
    requests: int
    busy_s: float


class Request(NamedTuple):
    """One request: what it takes, and what is in it."""

    seconds: float
    nbytes: float

    def price_s(self, floor: "Request") -> float:
        """Seconds for each byte beyond a smallest request.

        Less than 0 where it took less time, which its bytes do not explain.
        """
        return (self.seconds - floor.seconds) / (self.nbytes - floor.nbytes)


class Aim(NamedTuple):
    """What was decided, and what the next decision has to know of the ones before."""

    density: float  # entries to send / parameters
    dense: bool = False  # send a number for every parameter instead
    floor: Request = Request(math.inf, math.inf)  # with the smallest frames
    price_s: float | None = None  # seconds for each byte beyond that; None: not seen
    rest: int = 0  # arrivals until more is tried than was too much
    hold: int = 0  # arrivals to rest the next time


class Link(NamedTuple):
    """The last few outcomes of one replica.

    Example:
        >>> link = Link(size=1000, aim=Aim(density=0.01))
        >>> drained = Drained(nbytes=300, frames=2, requests=1, busy_s=0.003)
        >>> link = link.after(Measured(1000, 0.01, 90, False, 0.5, drained))
        >>> link.request(), link.request().price_s(floor=Request(0.001, 100))
        (Request(seconds=0.003, nbytes=300.0), 1e-05)
    """

    size: int  # parameters
    aim: Aim
    copies: int = 1  # see `Drained`
    packing: float = 1.0  # bytes of a frame / of one with independent positions
    steps_s: tuple[float, ...] = ()
    carried: tuple[Carried, ...] = ()  # the newest last
    idle_s: float = 0.0  # spent on requests by which nothing has arrived yet
    arrivals: int = 0  # how often anything has

    def after(self, measured: Measured) -> "Link":
        """Return the link as it is known after one more exchange."""
        drained = measured.drained
        packing, carried = self.packing, self.carried
        busy_s = self.idle_s + drained.busy_s
        if measured.frame_bytes and measured.density and not measured.dense:
            packing = measured.frame_bytes / plain_bytes(self.size, measured.density)
        if drained.frames:
            more = Carried(drained.nbytes, drained.frames, drained.requests, busy_s)
            carried, busy_s = (*carried, more)[-WINDOW:], 0.0
        return self._replace(
            copies=drained.copies,
            packing=packing,
            steps_s=(*self.steps_s, measured.step_s)[-WINDOW:],
            carried=carried,
            idle_s=busy_s,
            arrivals=self.arrivals + bool(drained.frames),
        )

    @property
    def step_s(self) -> float:
        """Seconds of computing between two exchanges."""
        return median(self.steps_s)

    def request(self) -> Request:
        """A request as they are now."""
        requests = self._requests()
        seconds = median(r.seconds for r in requests)
        return Request(seconds, median(r.nbytes for r in requests))

    def telling(self, floor: Request) -> Request | None:
        """The request with the price of the median byte.

        None if no request was so much larger than a smallest one that it tells a price.
        """
        larger = [r for r in self._requests() if r.nbytes > LARGER * floor.nbytes]
        half = sum(request.nbytes for request in larger) / 2
        for request in sorted(larger, key=lambda r: r.price_s(floor)):
            half -= request.nbytes
            if half <= 0:
                return request
        return None

    def _requests(self) -> list[Request]:
        return [
            Request(c.busy_s / max(c.requests, 1), c.nbytes / max(c.requests, 1))
            for c in self.carried
        ]

    def largest_frame(self) -> float:
        """Bytes of a frame, of the time with the largest ones."""
        return max(c.nbytes / c.frames for c in self.carried)

    def frame_bytes(self, density: float) -> float:
        """Bytes that a frame of a density would have, judged by the last one."""
        return self.packing * plain_bytes(self.size, density)

    def dense_bytes(self) -> int:
        """Bytes of a DENSE8 frame."""
        return HEADER_BYTES + dense8.length(self.size)


def plain_bytes(size: int, density: float) -> float:
    """Bytes of a frame whose entries are at independent positions.

    The entropy of the positions and one bit for each sign, which GAPS and BITMAP come
    near to, and the header.

    Example:
        >>> plain_bytes(8000, 0.5)
        1564.0
    """
    rest = 1 - density
    bits = density - density * math.log2(density)
    if rest > 0:
        bits -= rest * math.log2(rest)
    return HEADER_BYTES + size * bits / 8
