"""Send as densely as the link carries for a share of a step."""

import math
from dataclasses import dataclass

import torch
from typing_extensions import override

from daskdl.errors import OptionError
from daskdl.link import WINDOW, Aim, Link, Measured, Request
from daskdl.thresholds import LinkAlgorithm, Residual, Sent

# Of the parameters that moved, most that are sent as entries. One quantum for each of
# the 1/e largest moves the most mass at once where residuals are Laplacian; beyond,
# quanta get smaller faster than entries get more.
MOST = 1 / math.e
SAMPLE = 2**18  # values of the residual that are looked at
# Most times the density from one arrival to the next, while it is being looked for and
# once it has been found. And times the bytes where the least seemed to be too much: at
# once, and of the least at all.
SEARCHING, STEADY = 4.0, 1.9
WARY, TRIED = 1.3, 2.0
SOUND_AGAIN = 16  # arrivals after which the floor may be looked for again
# Weight of a new price per byte: where requests take less than half of what was
# foreseen, and where they take about that, as the rest is noise then. Where they take
# more than twice of it, it is believed at once.
FALLING, CALM = 1 / 3, 0.15
FADING = 0.95  # of the highest density, with each arrival
NEAR = 0.8  # medians of times that are 20 % off are not smaller than that
# Dense begins where it takes 0.8 of the share, and ends beyond 1.25 of it: medians of
# times that are 20 % off either way differ by less than that.
MARGIN = 1.25
# Arrivals until more is tried than seems to fit, twice as many each time in vain, or
# when dense had to be given up within LASTING: what 6 times the bytes of the densest
# entries take may show only when they are sent.
HOLD, LONGEST_HOLD, LASTING = 16, 1024, 64


@dataclass(frozen=True)
class LinkThreshold(LinkAlgorithm):
    """Choose the density at which sending takes at most a share of a step.

    It measures how long a step takes, and by how much longer a request takes for each
    byte in it. The latency is not counted, as it is the same for any density. From
    these follows a density, and from a sample of the residual the threshold that has
    this density.

    It begins with the smallest density, to learn the latency, and then goes up, at most
    4 times from one arrival of frames to the next. Where 8 bits for every parameter
    take no more than the share, it sends those (`sends_dense`). Among threads of one
    process there is no link: sending takes nothing of it, so all is sent.

    What it chooses follows measured times, so on a cluster a run with it is not
    repeatable, not with ``max_staleness=0`` either.

    Args:
        initial: First threshold, parameter units.
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

    initial: float = 1e-3
    share: float = 0.25
    min_density: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 < self.initial < math.inf:
            raise OptionError(f"initial must be finite and > 0, got {self.initial!r}")
        if not 0 < self.share <= 1:
            raise OptionError(f"share must be in (0, 1], got {self.share!r}")
        if not 0 < self.min_density < MOST:
            raise OptionError(
                f"min_density must be in (0, 1/e), got {self.min_density!r}"
            )

    @override
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        if last is None:
            return self.initial
        if last.link is None:  # carried on from another link
            return last.threshold
        sample = residual.sample(SAMPLE).abs()
        moved = sample[(sample > 0) & (sample < math.inf)]
        if not len(moved):
            return last.threshold
        most = max(min(last.link.aim.density * len(sample), MOST * len(moved)), 1)
        return float(torch.topk(moved, round(most), sorted=False).values.min())

    @override
    def sends_dense(self, last: Sent | None) -> bool:
        return last is not None and last.link is not None and last.link.aim.dense

    @override
    def learn(self, link: Link | None, measured: Measured) -> Link:
        former = link or Link(measured.size, Aim(self.min_density, hold=HOLD))
        link = former.after(measured)
        if link.arrivals == former.arrivals:
            return link
        if not measured.drained.requests:  # nothing but memory lies between
            return link._replace(aim=Aim(MOST, dense=True))
        return link._replace(aim=self._decide(link))

    def _decide(self, link: Link) -> Aim:
        aim = link.aim._replace(
            sounded=link.aim.sounded + 1,
            lasted=link.aim.lasted + 1,
            rest=max(link.aim.rest - 1, 0),
        )
        if aim.sounded < WINDOW:
            return aim
        if aim.sounded == WINDOW:
            aim = _sounded(link, aim)
        if aim.probe is not None:
            return self._probe(link, aim, aim.probe)
        aim = _priced(link, aim)
        price_s = max(aim.price_s or 0.0, 0.0) * link.copies
        budget_bytes = self.share * link.step_s / price_s if price_s else math.inf
        if self._is_dense(link, aim, budget_bytes):
            return aim if aim.dense else aim._replace(dense=True, lasted=0)
        return self._follow(link, _without_dense(aim), budget_bytes)

    def _is_dense(self, link: Link, aim: Aim, budget_bytes: float) -> bool:
        if aim.dense:
            return link.dense_bytes() <= MARGIN * budget_bytes
        ready = aim.density >= 0.9 * MOST and not aim.rest
        return ready and MARGIN * link.dense_bytes() <= budget_bytes

    def _follow(self, link: Link, aim: Aim, budget_bytes: float) -> Aim:
        affordable = self._density_of(link, budget_bytes)
        if aim.sounded > SOUND_AGAIN and affordable < aim.highest / 4:
            # Or the way itself is longer now: that is seen where little is sent.
            return aim._replace(density=self.min_density, sounded=0, highest=0.0)
        if affordable == aim.density == self.min_density:
            return aim if aim.rest else self._try_more(link, aim)
        carried = self._density_of(link, aim.growth * link.largest_frame())
        most = min(aim.growth * aim.density, carried)
        density = min(affordable, most)
        if affordable < most or density == MOST:
            aim = aim._replace(growth=STEADY)
            if density > aim.density / 2:  # the rest is mostly noise of the times
                density = math.sqrt(aim.density * density)
        highest = max(FADING * aim.highest, density)
        return aim._replace(density=density, highest=highest)

    def _try_more(self, link: Link, aim: Aim) -> Aim:
        """Even the least is too much, unless it is the way that has become longer."""
        aim = aim._replace(probe=link.smallest_request(), rest=2 * WINDOW)
        return aim._replace(density=self._a_little_more(link, aim))

    def _probe(self, link: Link, aim: Aim, probe: Request) -> Aim:
        price_s = link.seconds_per_byte(probe)
        if price_s is not None:
            aim = aim._replace(growth=STEADY, hold=HOLD)
            return aim._replace(probe=None, floor=probe, price_s=price_s)
        least = link.frame_bytes(self.min_density)
        if aim.rest and link.largest_frame() < 0.95 * TRIED * least:
            return aim._replace(density=self._a_little_more(link, aim))
        # Larger frames, and no larger requests: the link carries no more.
        return _rest(aim._replace(probe=None, density=self.min_density))

    def _a_little_more(self, link: Link, aim: Aim) -> float:
        least = link.frame_bytes(self.min_density)
        more = WARY * link.frame_bytes(aim.density)
        return self._density_of(link, min(more, TRIED * least))

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


def _sounded(link: Link, aim: Aim) -> Aim:
    """The smallest frames were sent: what more of them takes is to be seen."""
    floor = link.smallest_request()
    # So many in one request that it is their bytes that take time: they tell nothing.
    if floor.nbytes > 2 * aim.floor.nbytes:
        return aim
    return aim._replace(floor=floor, price_s=None, growth=SEARCHING)


def _priced(link: Link, aim: Aim) -> Aim:
    request, floor, former_s = link.request(), aim.floor, aim.price_s
    if request.seconds < NEAR * floor.seconds:
        floor = floor._replace(seconds=request.seconds)
    price_s = link.seconds_per_byte(floor)
    if price_s is None:
        price_s = former_s
    elif former_s is not None and not _is_new(aim):
        more = former_s * (request.nbytes - floor.nbytes)
        foreseen_s = floor.seconds + max(more, 0.0)
        if request.seconds < 2 * foreseen_s:
            weight = CALM if request.seconds > foreseen_s / 2 else FALLING
            price_s = former_s + weight * (price_s - former_s)
    return aim._replace(floor=floor, price_s=price_s)


def _is_new(aim: Aim) -> bool:
    """Whether frames have just become so much larger that they tell more."""
    return aim.lasted <= WINDOW if aim.dense else aim.growth == SEARCHING


def _without_dense(aim: Aim) -> Aim:
    if not aim.dense:
        return aim
    if aim.lasted >= LASTING:
        aim = aim._replace(hold=HOLD)
    return _rest(aim._replace(dense=False))


def _rest(aim: Aim) -> Aim:
    return aim._replace(rest=aim.hold, hold=min(2 * aim.hold, LONGEST_HOLD))
