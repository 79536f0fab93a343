"""Send as densely as the link carries for a share of a step."""

import math
from dataclasses import dataclass

from typing_extensions import override

from daskdl.errors import OptionError
from daskdl.link import WINDOW, Aim, Link, Measured
from daskdl.thresholds import (
    MOST,
    LinkAlgorithm,
    Residual,
    Sent,
    check_initial,
    first_threshold,
    threshold_for,
)

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
        >>> from daskdl.link import Drained
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
