"""Algorithms that choose the threshold of each exchange, one small class each.

An algorithm gets the outcome of the last exchange (threshold, density) and can read the
residual, which most do only for the first threshold. :class:`LinkThreshold` follows
measurements of the replica's outgoing link, and a mapping from patterns of parameter
names gives each parameter group its own algorithm.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median
from typing import NamedTuple, Protocol

from torch import Tensor
from typing_extensions import override

from daskdl.codec import dense8
from daskdl.errors import OptionError

# Number of measurements in a median, which tolerates two outliers and follows a change
# after three measurements.
WINDOW = 5
HEADER_BYTES = 64  # header of a frame
LARGER = 1.5  # times the bytes of the smallest requests: large enough to show a price


class Drained(NamedTuple):
    """Frames that a channel has delivered since the previous call."""

    nbytes: int = 0  # bytes of delivered frames, each copy counted
    frames: int = 0  # delivered frames, each copy counted
    requests: int = 0  # requests that delivered them; 0 between threads, without a link
    busy_s: float = 0.0  # seconds with at least one such request in flight
    copies: int = 1  # copies that leave this replica for each frame it publishes


class Measured(NamedTuple):
    """Measurements of one exchange, and deliveries since the exchange before."""

    size: int  # parameters
    density: float  # entries sent / parameters, in [0, 1]
    frame_bytes: int  # 0 if no frame was published
    dense: bool  # the frame had a number for every parameter
    step_s: float  # computation between two possible exchanges, without waits
    drained: Drained


class Request(NamedTuple):
    """Duration and size of a request."""

    seconds: float
    nbytes: float

    def price_s(self, floor: "Request") -> float:
        """Return seconds per byte beyond the floor; < 0 if faster than the floor."""
        return (self.seconds - floor.seconds) / (self.nbytes - floor.nbytes)


class Link(NamedTuple):
    """Measurements of a replica's outgoing link, and the density chosen for it.

    Example:
        >>> drained = Drained(nbytes=300, frames=2, requests=1, busy_s=0.003)
        >>> measured = Measured(1000, 0.01, 90, False, 0.5, drained)
        >>> link = Link(size=1000, density=0.01).after(measured)
        >>> link.request(), link.request().price_s(floor=Request(0.001, 100))
        (Request(seconds=0.003, nbytes=300.0), 1e-05)
    """

    size: int  # parameters
    # The current decision, and the state that the next decision depends on.
    density: float  # entries to send / parameters
    dense: bool = False  # send a number for every parameter instead
    floor: Request = Request(math.inf, math.inf)  # median smallest request
    price_s: float | None = None  # seconds per byte beyond the floor; None: unknown
    rest: int = 0  # deliveries to wait before exceeding a load that was too high
    hold: int = 0  # deliveries to wait the next time
    # The last few measurements, the newest last.
    packing: float = 1.0  # bytes of the last frame / `plain_bytes`
    steps_s: tuple[float, ...] = ()
    delivered: tuple[Drained, ...] = ()  # `busy_s` since the delivery before
    idle_s: float = 0.0  # busy time since the last delivery

    def after(self, measured: Measured) -> "Link":
        """Return the link with one more exchange measured."""
        drained = measured.drained
        packing, delivered = self.packing, self.delivered
        busy_s = self.idle_s + drained.busy_s
        if measured.frame_bytes and measured.density and not measured.dense:
            packing = measured.frame_bytes / plain_bytes(self.size, measured.density)
        if drained.frames:
            delivered = (*delivered, drained._replace(busy_s=busy_s))[-WINDOW:]
            busy_s = 0.0
        return self._replace(
            packing=packing,
            steps_s=(*self.steps_s, measured.step_s)[-WINDOW:],
            delivered=delivered,
            idle_s=busy_s,
        )

    def _requests(self) -> list[Request]:
        counts = [(d, max(d.requests, 1)) for d in self.delivered]
        return [Request(d.busy_s / n, d.nbytes / n) for d, n in counts]

    def request(self) -> Request:
        """Return the median request."""
        seconds, nbytes = zip(*self._requests(), strict=True)
        return Request(median(seconds), median(nbytes))

    def request_with_price(self, floor: Request) -> Request | None:
        """Return the request with the median price, weighted by bytes.

        None if no request is large enough, compared with the floor, to show a price.
        """
        larger = [r for r in self._requests() if r.nbytes > LARGER * floor.nbytes]
        half = sum(request.nbytes for request in larger) / 2
        for request in sorted(larger, key=lambda r: r.price_s(floor)):
            half -= request.nbytes
            if half <= 0:
                return request
        return None

    def frame_bytes(self, density: float) -> float:
        """Estimate the bytes of a frame of some density from the last frame."""
        return self.packing * plain_bytes(self.size, density)


def plain_bytes(size: int, density: float) -> float:
    """Return the bytes of a frame whose entries are at independent positions.

    The sum of the entropy of the positions, to which GAPS and BITMAP come close, one
    bit for each sign, and the header.

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
# The density recorded for a dense update. It is above every default band, so that the
# threshold rises; Deeplearning4j's bitmap becomes smaller than its entries there.
DENSE_DENSITY = 1 / 16
# Largest share of the moved parameters to send as entries. With Laplacian residuals,
# one quantum for each of the 1/e largest moves the most mass at once; at higher
# densities, quanta shrink faster than the number of entries grows.
MOST = 1 / math.e
SAMPLE = 2**18  # values of the residual in a sample


class Sent(NamedTuple):
    """The outcome of the last exchange."""

    threshold: float  # threshold of the algorithm, not rounded to the grid
    density: float  # entries sent / parameters, in [0, 1]
    link: Link | None = None  # result of `learn`; never sent or saved


class Residual(Protocol):
    """The residual of some parameters, computed on request."""

    def tensor(self) -> Tensor:
        """Return the whole residual, shape (N,), parameter units, a new tensor."""

    def sample(self, most: int) -> Tensor:
        """Return about ``most`` values of the residual, or all if there are fewer.

        The values are short runs spread over the whole vector, always at the same
        positions; a new tensor on the CPU.
        """


class ThresholdAlgorithm(ABC):
    """Chooses the next threshold from the outcome of the last exchange.

    Implementations are frozen and stateless: the compressor keeps :class:`Sent` and
    passes it back.
    """

    @abstractmethod
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        """Return a threshold, finite and > 0, in parameter units.

        Args:
            residual: The residual to which the threshold will be applied; reading it
                costs a pass over memory.
            last: Outcome of the previous exchange; None before the first exchange.
        """


class LinkAlgorithm(ThresholdAlgorithm):
    """A threshold algorithm that follows measurements of the link.

    It covers all parameters, since they share the link.
    """

    @abstractmethod
    def sends_dense(self, last: Sent | None) -> bool:
        """Return whether to send 8 bits for every parameter instead of entries."""

    @abstractmethod
    def learn(self, link: Link | None, measured: Measured) -> Link:
        """Return the state of the link after one more exchange.

        The compressor passes it back in ``last.link``.

        Args:
            link: Result of the previous call; None the first time.
            measured: Measurements of the exchange.
        """


def average_sent(outcomes: Iterable[Sent | None]) -> Sent | None:
    """Average the outcomes of several replicas, for the next run or a joining replica.

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


def threshold_for(
    density: float, residual: Residual, most: int = SAMPLE
) -> float | None:
    """Return the threshold for a density, from a sample of the residual.

    Args:
        density: Entries / parameters; limited to 1/e of the nonzero values. At least
            one value of the sample reaches the threshold.
        residual: The residual to sample.
        most: Values in the sample, about.

    Returns:
        Parameter units, > 0; None if no sampled value is finite and nonzero.
    """
    sample = residual.sample(most).abs().numpy()
    sample[~(sample < math.inf)] = 0.0
    moved = int((sample > 0).sum())
    if not moved:
        return None
    largest = round(max(min(density * len(sample), MOST * moved), 1))
    sample.partition(-largest)  # an eighth of the time of torch.topk
    return float(sample[-largest])


def first_threshold(initial: float | None, density: float, residual: Residual) -> float:
    """Return a given first threshold, or the threshold for a density."""
    if initial is not None:
        return initial
    return threshold_for(density, residual) or DL4J_INITIAL


def check_initial(initial: float | None) -> None:
    """Check that a first threshold is None, or finite and > 0."""
    if initial is not None:
        _check_positive("initial", initial)


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise OptionError(f"{name} must be finite and > 0, got {value!r}")


def _check_decay(decay: float) -> None:
    if not 0.5 <= decay < 1:
        raise OptionError(f"decay must be in [0.5, 1), got {decay!r}")


def _steered(last: Sent, low: float, high: float, decay: float) -> float:
    if last.density < low:
        return last.threshold * decay
    if last.density > high:
        return last.threshold / decay
    return last.threshold


@dataclass(frozen=True)
class AdaptiveThreshold(ThresholdAlgorithm):
    """Steers the density into the band ``[min_density, max_density]``.

    The threshold is multiplied by ``decay`` below the band and divided by ``decay``
    above it.

    Args:
        initial: First threshold, parameter units. None: the threshold that sends the
            geometric mean of the band's edges in a sample of the first residual; 1e-4
            if the sample is all zero.
        min_density: Lower edge of the band, entries sent / parameters.
        max_density: Upper edge of the band.
        decay: Factor per exchange, in [0.5, 1); the default halves the threshold in 20
            exchanges.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> rule = AdaptiveThreshold(initial=1e-3, max_density=0.01, decay=0.5)
        >>> rule.next_threshold(residual=None, last=Sent(1e-3, density=0.2))
        0.002

    Source:
        Deeplearning4j, AdaptiveThresholdAlgorithm.java (2021), which always starts at
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
        return _steered(last, self.min_density, self.max_density, self.decay)


@dataclass(frozen=True)
class FixedThreshold(ThresholdAlgorithm):
    """Uses the same threshold for every exchange.

    Args:
        value: The threshold, parameter units.

    Raises:
        OptionError: If ``value`` is not finite and > 0.

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
    """Steers the density to a target; the threshold changes at nearly every exchange.

    Args:
        initial: First threshold, parameter units. None: the threshold that sends
            `target` in a sample of the first residual; 1e-4 if the sample is all zero.
        target: Target density, entries sent / parameters, in (0, 1/16).
        decay: Factor per exchange, in [0.5, 1); the default halves the threshold in 20
            exchanges.

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
        return _steered(last, self.target, self.target, self.decay)


# Values from which `SampledThreshold` takes a threshold: the density is then a few per
# cent off, and drawing them costs far less than the scan.
FEW = 2**15


@dataclass(frozen=True)
class SampledThreshold(ThresholdAlgorithm):
    """Sends the same density in every exchange.

    Before each exchange, the threshold for this density is taken from a sample of the
    residual. How many steps lie between two exchanges then decides how much a step
    sends; see ``exchange_every`` of :class:`~daskdl.GradientSharing`.

    Args:
        density: Entries sent / parameters, in (0, 1/e).

    Raises:
        OptionError: If ``density`` is outside its range.

    Example:
        >>> SampledThreshold(density=0.5)
        Traceback (most recent call last):
        daskdl.errors.OptionError: density must be in (0, 1/e), got 0.5

    Source:
        Lin and others, "Deep Gradient Compression", ICLR 2018, section 3: top-k
        thresholds from a sample.
    """

    density: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.density < MOST:
            raise OptionError(f"density must be in (0, 1/e), got {self.density!r}")

    @override
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        found = threshold_for(self.density, residual, FEW)
        return found or (DL4J_INITIAL if last is None else last.threshold)


GROWTH = 1.9  # largest factor on density and bytes, from one delivery to the next
# The first price counts once a request takes more than this factor times the floor:
# with durations up to 20 % off, the factor reaches 1.2 / 0.8 at a price of 0.
SEEN = 1.5
CALM = 0.1  # weight of a new price while requests take about as long as predicted
CHANGED = 2.0  # factor off the prediction, either way, at which the link has changed
NEAR = 0.8  # medians of durations up to 20 % off are not smaller
# Dense updates begin at 0.8 of the share and end beyond 1.25 of it: medians of
# durations up to 20 % off differ by less.
MARGIN = 1.25
# Deliveries to wait before growing again after a load was too high, doubled each time.
# The cost of dense frames, 6 times the bytes of the densest entries, may show only
# after they are sent.
HOLD, LONGEST_HOLD = 16, 1024


@dataclass(frozen=True)
class LinkThreshold(LinkAlgorithm):
    """Chooses the density at which sending takes at most a share of a step.

    The algorithm measures the duration of a step and the time per byte of a request,
    without the latency, which is the same for every density. These two determine a
    density, and a sample of the residual gives the threshold for it.

    The density starts at its minimum, to measure the latency, and grows by at most 1.9
    times from one delivery of frames to the next. If 8 bits for every parameter take no
    more than the share, dense updates are sent (`sends_dense`). Between threads of one
    process there is no link, so the whole residual is sent. ``docs/how-it-works.md``
    has the rule.

    Since the result depends on measured times, a run on a cluster is not reproducible,
    even with ``max_staleness=0``.

    Args:
        initial: First threshold, parameter units. None: the threshold that sends
            `min_density` in a sample of the first residual; 1e-4 if the sample is all
            zero.
        share: Share of a step's duration that sending may take, in (0, 1].
        min_density: Density that is sent at any cost, entries sent / parameters, in
            (0, 1/e).

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> rule = LinkThreshold(share=0.5)
        >>> rule.next_threshold(residual=None, last=None)
        0.001
        >>> from daskdl.thresholds import Drained
        >>> link = rule.learn(None, Measured(10**6, 0.002, 3000, False, 0.1, Drained()))
        >>> link.density, rule.sends_dense(Sent(0.001, 0.002, link))
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
        if last.link is None:  # continued from another link
            return last.threshold
        return threshold_for(last.link.density, residual) or last.threshold

    @override
    def sends_dense(self, last: Sent | None) -> bool:
        return last is not None and last.link is not None and last.link.dense

    @override
    def learn(self, link: Link | None, measured: Measured) -> Link:
        if link is None:
            link = Link(measured.size, self.min_density, rest=WINDOW, hold=HOLD)
        link = link.after(measured)
        if not measured.drained.frames:
            return link
        if not measured.drained.requests:  # threads: there is no link
            return link._replace(density=MOST, dense=True)
        link = link._replace(rest=max(link.rest - 1, 0))
        if link.density == self.min_density:
            link = link._replace(floor=link.request(), price_s=None)
            return link if link.rest else self._grown(link, math.inf)
        link = _priced(link)
        budget_bytes = math.inf
        if link.price_s is not None and link.price_s > 0:
            budget_s = self.share * median(link.steps_s)
            budget_bytes = budget_s / (link.price_s * measured.drained.copies)
        dense_bytes = HEADER_BYTES + dense8.length(link.size)
        fits = MARGIN * dense_bytes <= budget_bytes
        if link.dense:
            if dense_bytes <= MARGIN * budget_bytes:
                return link
            link = _too_much(link._replace(dense=False))
        elif fits and link.density == MOST and not link.rest:
            return link._replace(dense=True)
        return self._grown(link, budget_bytes)

    def _grown(self, link: Link, budget_bytes: float) -> Link:
        largest = max(drained.nbytes / drained.frames for drained in link.delivered)
        most_bytes = min(budget_bytes, GROWTH * largest)
        density = min(self._density_of(link, most_bytes), GROWTH * link.density)
        if density == self.min_density:
            link = _too_much(link)
        return link._replace(density=density)

    def _density_of(self, link: Link, most_bytes: float) -> float:
        """Return the highest density whose frames have at most `most_bytes` bytes."""
        if link.frame_bytes(MOST) <= most_bytes:
            return MOST
        low, high = self.min_density, MOST
        for _ in range(40):  # relative error far below 1e-6
            middle = math.sqrt(low * high)
            if link.frame_bytes(middle) <= most_bytes:
                low = middle
            else:
                high = middle
        return low


def _priced(link: Link) -> Link:
    """Update the price of a byte, and the floor if requests have become faster."""
    request, floor, former_s = link.request(), link.floor, link.price_s
    if request.seconds < NEAR * floor.seconds:
        floor = floor._replace(seconds=request.seconds)
        link = link._replace(floor=floor)
    larger = link.request_with_price(floor)
    if larger is None:
        return link
    price_s = larger.price_s(floor)
    if former_s is None:
        seen = larger.seconds > SEEN * floor.seconds
        return link._replace(price_s=price_s) if seen else link
    foreseen_s = floor.seconds + former_s * max(request.nbytes - floor.nbytes, 0.0)
    if not foreseen_s / CHANGED < request.seconds < CHANGED * foreseen_s:
        return link._replace(price_s=price_s, hold=HOLD, rest=0)
    return link._replace(price_s=former_s + CALM * (price_s - former_s))


def _too_much(link: Link) -> Link:
    return link._replace(rest=link.hold, hold=min(2 * link.hold, LONGEST_HOLD))


ALL = "*"  # the pattern of a single algorithm
SHOWN = 5  # names in a message


@dataclass(frozen=True, eq=False, repr=False)
class LayerThresholds(Mapping[str, ThresholdAlgorithm]):
    """Threshold algorithms by pattern of parameter names, in order; hashable.

    Equal to any mapping with the same patterns in the same order.

    Attributes:
        pairs: Patterns for :mod:`fnmatch`, each with its algorithm.

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
        """Convert a mapping, or a single algorithm for all parameters."""
        if isinstance(threshold, LayerThresholds):
            return threshold
        if isinstance(threshold, ThresholdAlgorithm):
            return cls(((ALL, threshold),))
        if isinstance(threshold, Mapping):
            return cls(tuple(threshold.items()))
        raise OptionError(refusal(threshold))

    def assign(self, names: Collection[str]) -> dict[str, str]:
        """Return the first pattern that matches each parameter.

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
    """Return the error message for an invalid threshold option."""
    return (
        "threshold must be a daskdl.ThresholdAlgorithm, such as FixedThreshold(1e-3), "
        f"or a mapping from patterns of parameter names to such, got {value!r}"
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
