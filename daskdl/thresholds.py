"""How large a step must be before it is sent: one small class per algorithm.

An algorithm sees the outcome of the last exchange (threshold, density) and looks at the
residual at most once, to begin with. :class:`LinkThreshold` steers by what the replica
has measured of its way out, and a mapping gives parts of a model algorithms of their
own, by the names of their parameters.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from daskdl.codec import dense8
from daskdl.errors import OptionError

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


DL4J_INITIAL = 1e-4
HALVES_IN_20 = 0.5 ** (1 / 20)  # Deeplearning4j's decay
# The density that a dense message counts as: above every default band, so that the
# threshold rises. Where the bitmap of Deeplearning4j becomes smaller than its entries.
DENSE_DENSITY = 1 / 16
# Of the parameters that moved, most that are sent as entries. One quantum for each of
# the 1/e largest moves the most mass at once where residuals are Laplacian; beyond,
# quanta get smaller faster than entries get more.
MOST = 1 / math.e
SAMPLE = 2**18  # values of the residual that are looked at


class Sent(NamedTuple):
    """What the last exchange did."""

    threshold: float  # as the rule said, before the grid; parameter units
    density: float  # entries sent / parameters, in [0, 1]
    link: Link | None = None  # what `learn` made of it; of this replica, now


class Residual(Protocol):
    """The progress not sent yet, made on request."""

    def tensor(self) -> Tensor:
        """Return ``local - shared``, shape (N,), parameter units, a fresh tensor."""

    def sample(self, most: int) -> Tensor:
        """Return about so many of its values, or all if there are no more.

        They come in short runs from the whole vector, always of the same positions; a
        fresh tensor, on the CPU.
        """


class ThresholdAlgorithm(ABC):
    """Choose the next threshold from what the last one did.

    Implementations are frozen and keep no state: the accumulator owns
    :class:`Sent` and passes it back in.
    """

    @abstractmethod
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        """Return a threshold, finite and > 0, in parameter units.

        Args:
            residual: What the threshold will be applied to; costs a pass over memory
                if it is asked for.
            last: Outcome of the previous exchange; None on the first one.
        """


class LinkAlgorithm(ThresholdAlgorithm):
    """A threshold algorithm that follows what was measured of the link.

    It decides for all parameters at once: all of them go over the same link.
    """

    @abstractmethod
    def sends_dense(self, last: Sent | None) -> bool:
        """Return whether to send 8 bits for every parameter, and no entries.

        Args:
            last: As of :meth:`next_threshold`, which is not asked then.
        """

    @abstractmethod
    def learn(self, link: Link | None, measured: Measured) -> Link:
        """Return what is known of the link after one more exchange.

        It comes back in ``last.link``.

        Args:
            link: What this returned last, or None the first time.
            measured: What the exchange took.
        """


def average_sent(outcomes: Iterable[Sent | None]) -> Sent | None:
    """Merge what several replicas did, to carry it on to the next run or newcomer.

    Args:
        outcomes: One per replica; None where a replica has not sent yet.

    Returns:
        Mean threshold and mean density over those that have sent; None if none has.
        Nothing of their links: who carries on measures its own.

    Example:
        >>> average_sent([Sent(1.0, 0.25), None, Sent(2.0, 0.75)])
        Sent(threshold=1.5, density=0.5, link=None)

    Source:
        Deeplearning4j, AdaptiveThresholdAlgorithm.Reducer (2021).
    """
    used = [outcome for outcome in outcomes if outcome is not None]
    if not used:
        return None
    return Sent(
        math.fsum(outcome.threshold for outcome in used) / len(used),
        math.fsum(outcome.density for outcome in used) / len(used),
    )


def threshold_for(density: float, residual: Residual) -> float | None:
    """Find the threshold that a share of the residual reaches, in a sample of it.

    Args:
        density: That share, entries / parameters; of what has moved it is 1/e at most.
        residual: At least one value of it is taken.

    Returns:
        Parameter units, > 0; None if nothing in the sample has moved.
    """
    sample = residual.sample(SAMPLE).abs()
    moved = sample[(sample > 0) & (sample < math.inf)]
    if not len(moved):
        return None
    most = max(min(density * len(sample), MOST * len(moved)), 1)
    return float(torch.topk(moved, round(most), sorted=False).values.min())


def first_threshold(initial: float | None, density: float, residual: Residual) -> float:
    """Begin with a given threshold, or with the one that sends so much.

    Args:
        initial: Parameter units; None: it is found in a sample of the residual.
        density: What is to be sent then, entries / parameters.
        residual: At least one value of it is taken, if `initial` is None.

    Returns:
        Parameter units, > 0; Deeplearning4j's 1e-4 if nothing in the sample has moved.
    """
    if initial is not None:
        return initial
    return threshold_for(density, residual) or DL4J_INITIAL


def check_initial(initial: float | None) -> None:
    """Refuse what cannot be a first threshold.

    Raises:
        OptionError: If it is a number, and not finite and > 0.
    """
    if initial is not None:
        _check_positive("initial", initial)


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise OptionError(f"{name} must be finite and > 0, got {value!r}")


def _check_decay(decay: float) -> None:
    if not 0.5 <= decay < 1:
        raise OptionError(f"decay must be in [0.5, 1), got {decay!r}")


@dataclass(frozen=True)
class AdaptiveThreshold(ThresholdAlgorithm):
    """Steer the sent fraction into ``[min_density, max_density]``.

    Too little sent: lower the threshold by ``decay``. Too much: raise it by
    ``1 / decay``. Inside the band: leave it alone.

    Args:
        initial: First threshold, parameter units. None: found in a sample of the first
            residual, such that the middle of the band is sent, on a logarithmic scale;
            1e-4 if nothing has moved.
        min_density: Lower edge of the band, entries sent / parameters.
        max_density: Upper edge of the band.
        decay: Factor per exchange, in [0.5, 1); the default halves in 20 exchanges.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> rule = AdaptiveThreshold(initial=1e-3, max_density=0.01, decay=0.5)
        >>> rule.next_threshold(residual=None, last=Sent(1e-3, density=0.2))
        0.002

    Source:
        Deeplearning4j, AdaptiveThresholdAlgorithm.java (2021), which always begins at
        1e-4.
    """

    initial: float | None = DL4J_INITIAL
    min_density: float = 1e-4
    max_density: float = 1e-2
    decay: float = HALVES_IN_20

    def __post_init__(self) -> None:
        check_initial(self.initial)
        if not 0 < self.min_density <= self.max_density <= 1:
            raise OptionError(
                "need 0 < min_density <= max_density <= 1, "
                f"got {self.min_density!r} and {self.max_density!r}"
            )
        _check_decay(self.decay)

    @override
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        if last is None:
            middle = math.sqrt(self.min_density * self.max_density)
            return first_threshold(self.initial, middle, residual)
        if last.density < self.min_density:
            return last.threshold * self.decay
        if last.density > self.max_density:
            return last.threshold / self.decay
        return last.threshold


@dataclass(frozen=True)
class FixedThreshold(ThresholdAlgorithm):
    """Always the same threshold.

    Args:
        value: The threshold, parameter units.

    Raises:
        OptionError: If it is not finite and > 0.

    Example:
        >>> FixedThreshold(0.25).next_threshold(residual=None, last=Sent(1.0, 0.5))
        0.25
    """

    value: float = 1e-3

    def __post_init__(self) -> None:
        _check_positive("value", self.value)

    @override
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        return self.value


@dataclass(frozen=True)
class TargetSparsityThreshold(ThresholdAlgorithm):
    """Steer the sent fraction to one number; moves at nearly every exchange.

    Args:
        initial: First threshold, parameter units. None: found in a sample of the first
            residual, such that `target` is sent; 1e-4 if nothing has moved.
        target: Density aimed at, in (0, 1/16).
        decay: Factor per exchange, in [0.5, 1); the default halves in 20 exchanges.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> rule = TargetSparsityThreshold(target=0.01, decay=0.5)
        >>> rule.next_threshold(residual=None, last=Sent(1e-3, density=0.001))
        0.0005

    Source:
        Deeplearning4j, TargetSparsityThresholdAlgorithm.java (2021).
    """

    initial: float | None = DL4J_INITIAL
    target: float = 1e-3
    decay: float = HALVES_IN_20

    def __post_init__(self) -> None:
        check_initial(self.initial)
        if not 0 < self.target < DENSE_DENSITY:
            raise OptionError(f"target must be in (0, 1/16), got {self.target!r}")
        _check_decay(self.decay)

    @override
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        if last is None:
            return first_threshold(self.initial, self.target, residual)
        if last.density < self.target:
            return last.threshold * self.decay
        if last.density > self.target:
            return last.threshold / self.decay
        return last.threshold


GROWTH = 1.9  # most times the density and the bytes, from one arrival to the next
# Times what the least takes: there a first price is believed. With times that are 20 %
# off either way, requests without a price take 1.2 / 0.8 of it at most.
SEEN = 1.5
CALM = 0.1  # weight of a new price, where requests take about what was foreseen
# Times off either way, from where on they do not: the link has changed.
CHANGED = 2.0
NEAR = 0.8  # medians of times that are 20 % off are not smaller than that
# Dense begins where it takes 0.8 of the share, and ends beyond 1.25 of it: medians of
# times that are 20 % off either way differ by less than that.
MARGIN = 1.25
# Arrivals until more is tried again than was too much, twice as many each time. What 6
# times the bytes of the densest entries take may show only when they are sent.
HOLD, LONGEST_HOLD = 16, 1024


@dataclass(frozen=True)
class LinkThreshold(LinkAlgorithm):
    """Choose the density at which sending takes at most a share of a step.

    It measures how long a step takes, and by how much longer a request takes for each
    byte in it. The latency is not counted, as it is the same for any density. From
    these follows a density, and from a sample of the residual the threshold that has
    this density.

    It begins with the smallest density, to learn the latency, and then goes up, at most
    1.9 times from one arrival of frames to the next. Where 8 bits for every parameter
    take no more than the share, it sends those (`sends_dense`). Among threads of one
    process there is no link, so all is sent. ``docs/how-it-works.md`` has the rule.

    What it chooses follows measured times, so on a cluster a run with it is not
    repeatable, not with ``max_staleness=0`` either.

    Args:
        initial: First threshold, parameter units. None: found in a sample of the first
            residual, such that `min_density` is sent; 1e-4 if nothing has moved.
        share: Of a step that sending may take, in (0, 1].
        min_density: Entries sent / parameters that are sent whatever it takes, in
            (0, 1/e).

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> rule = LinkThreshold(share=0.5)
        >>> rule.next_threshold(residual=None, last=None)
        0.001
        >>> from daskdl.thresholds import Drained
        >>> link = rule.learn(None, Measured(10**6, 0.002, 3000, False, 0.1, Drained()))
        >>> link.aim.density, rule.sends_dense(Sent(0.001, 0.002, link))
        (0.0001, False)
    """

    initial: float | None = 1e-3
    share: float = 0.25
    min_density: float = 1e-4

    def __post_init__(self) -> None:
        check_initial(self.initial)
        if not 0 < self.share <= 1:
            raise OptionError(f"share must be in (0, 1], got {self.share!r}")
        if not 0 < self.min_density < MOST:
            raise OptionError(
                f"min_density must be in (0, 1/e), got {self.min_density!r}"
            )

    @override
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        if last is None:
            return first_threshold(self.initial, self.min_density, residual)
        if last.link is None:  # carried on from another link
            return last.threshold
        return threshold_for(last.link.aim.density, residual) or last.threshold

    @override
    def sends_dense(self, last: Sent | None) -> bool:
        return last is not None and last.link is not None and last.link.aim.dense

    @override
    def learn(self, link: Link | None, measured: Measured) -> Link:
        former = link or Link(
            measured.size, Aim(self.min_density, rest=WINDOW, hold=HOLD)
        )
        link = former.after(measured)
        if link.arrivals == former.arrivals:
            return link
        if not measured.drained.requests:  # nothing but memory lies between
            return link._replace(aim=Aim(MOST, dense=True))
        aim = link.aim._replace(rest=max(link.aim.rest - 1, 0))
        return link._replace(aim=self._decide(link, aim))

    def _decide(self, link: Link, aim: Aim) -> Aim:
        if aim.density == self.min_density:
            aim = aim._replace(floor=link.request(), price_s=None)
            return aim if aim.rest else self._grow(link, aim, math.inf)
        aim = _priced(link, aim)
        budget_bytes = math.inf
        if aim.price_s is not None and aim.price_s > 0:
            budget_bytes = self.share * link.step_s / (aim.price_s * link.copies)
        fits = MARGIN * link.dense_bytes() <= budget_bytes
        if aim.dense:
            if link.dense_bytes() <= MARGIN * budget_bytes:
                return aim
            aim = _too_much(aim._replace(dense=False))
        elif aim.density == MOST and not aim.rest and fits:
            return aim._replace(dense=True)
        return self._grow(link, aim, budget_bytes)

    def _grow(self, link: Link, aim: Aim, budget_bytes: float) -> Aim:
        most_bytes = min(budget_bytes, GROWTH * link.largest_frame())
        density = min(self._density_of(link, most_bytes), GROWTH * aim.density)
        if density == self.min_density:
            aim = _too_much(aim)
        return aim._replace(density=density)

    def _density_of(self, link: Link, most_bytes: float) -> float:
        """The highest density with frames of at most so many bytes."""
        if link.frame_bytes(MOST) <= most_bytes:
            return MOST
        low, high = self.min_density, MOST
        for _ in range(40):  # to a millionth of the smallest
            middle = math.sqrt(low * high)
            if link.frame_bytes(middle) <= most_bytes:
                low = middle
            else:
                high = middle
        return low


def _priced(link: Link, aim: Aim) -> Aim:
    request, floor, former_s = link.request(), aim.floor, aim.price_s
    if request.seconds < NEAR * floor.seconds:
        floor = floor._replace(seconds=request.seconds)
        aim = aim._replace(floor=floor)
    telling = link.telling(floor)
    if telling is None:
        return aim
    price_s = telling.price_s(floor)
    if former_s is None:
        seen = telling.seconds > SEEN * floor.seconds
        return aim._replace(price_s=price_s) if seen else aim
    foreseen_s = floor.seconds + former_s * max(request.nbytes - floor.nbytes, 0.0)
    if not foreseen_s / CHANGED < request.seconds < CHANGED * foreseen_s:
        return aim._replace(price_s=price_s, hold=HOLD, rest=0)
    return aim._replace(price_s=former_s + CALM * (price_s - former_s))


def _too_much(aim: Aim) -> Aim:
    return aim._replace(rest=aim.hold, hold=min(2 * aim.hold, LONGEST_HOLD))


ALL = "*"  # the pattern of an algorithm that is alone
SHOWN = 5  # names in a message


@dataclass(frozen=True, eq=False, repr=False)
class LayerThresholds(Mapping[str, ThresholdAlgorithm]):
    """Threshold algorithms by pattern of parameter names, in order; hashable.

    Equal to any mapping with the same patterns in the same order.

    Attributes:
        pairs: A pattern, as of :mod:`fnmatch`, and its algorithm, each.

    Raises:
        OptionError: If there is none, or one is not a pattern and an algorithm, or
            one that follows the link is not alone.

    Example:
        >>> from daskdl import FixedThreshold
        >>> LayerThresholds.of(FixedThreshold(0.25))
        {'*': FixedThreshold(value=0.25)}
    """

    pairs: tuple[tuple[str, ThresholdAlgorithm], ...]

    def __post_init__(self) -> None:
        sound = all(
            isinstance(pattern, str) and isinstance(algorithm, ThresholdAlgorithm)
            for pattern, algorithm in self.pairs
        )
        if not self.pairs or not sound:
            raise OptionError(refusal(dict(self.pairs)))
        for pattern, algorithm in self.pairs:
            if len(self.pairs) > 1 and isinstance(algorithm, LinkAlgorithm):
                raise OptionError(
                    f"threshold pattern {pattern!r} has an algorithm that follows the "
                    f"link, got {algorithm!r} beside others; the link is that of all "
                    "parameters, so give it alone"
                )

    @classmethod
    def of(cls, threshold: object) -> "LayerThresholds":
        """Return a mapping as this; of a single algorithm, for all parameters.

        Raises:
            OptionError: If it is neither.
        """
        if isinstance(threshold, LayerThresholds):
            return threshold
        if isinstance(threshold, ThresholdAlgorithm):
            return cls(((ALL, threshold),))
        if isinstance(threshold, Mapping):
            return cls(tuple(threshold.items()))
        raise OptionError(refusal(threshold))

    def assign(self, names: Collection[str]) -> dict[str, str]:
        """Return the pattern of each parameter: the first that matches.

        Args:
            names: As in ``named_parameters``, trainable ones only.

        Raises:
            OptionError: If a name has no pattern, or a pattern no name.

        Example:
            >>> from daskdl import AdaptiveThreshold, FixedThreshold
            >>> thresholds = LayerThresholds.of(
            ...     {"*.bias": FixedThreshold(1e-3), "*": AdaptiveThreshold()}
            ... )
            >>> thresholds.assign(["0.weight", "0.bias"])
            {'0.weight': '*', '0.bias': '*.bias'}
        """
        assigned = {name: self._first(name) for name in names}
        used = set(assigned.values())
        for pattern in self:
            if pattern not in used:
                raise OptionError(_useless(pattern, assigned))
        return assigned

    def _first(self, name: str) -> str:
        for pattern in self:
            if fnmatchcase(name, pattern):
                return pattern
        raise OptionError(
            f"threshold has no pattern that parameter {name!r} matches, got "
            f"{list(self)}; end it with '*' for all others"
        )

    @override
    def __getitem__(self, pattern: str) -> ThresholdAlgorithm:
        return dict(self.pairs)[pattern]

    @override
    def __iter__(self) -> Iterator[str]:
        return (pattern for pattern, _ in self.pairs)

    @override
    def __len__(self) -> int:
        return len(self.pairs)

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return self.pairs == tuple(other.items())

    @override
    def __hash__(self) -> int:
        return hash(self.pairs)

    @override
    def __repr__(self) -> str:
        return repr(dict(self.pairs))


def refusal(value: object) -> str:
    """What is allowed, for messages."""
    return (
        "threshold must be a daskdl.ThresholdAlgorithm, or a mapping from patterns of "
        f"parameter names to such, got {value!r}"
    )


def _useless(pattern: str, assigned: Mapping[str, str]) -> str:
    for name, first in assigned.items():
        if fnmatchcase(name, pattern):
            return (
                f"threshold pattern {pattern!r} gets no parameter: {name!r} and all "
                f"others that it matches go to {first!r} or others before it; put it "
                "first, or leave it out"
            )
    names = ", ".join(repr(name) for name in list(assigned)[:SHOWN])
    more = ", ..." if len(assigned) > SHOWN else ""
    return (
        f"threshold pattern {pattern!r} matches no trainable parameter of the model, "
        f"which are {names}{more}"
    )
