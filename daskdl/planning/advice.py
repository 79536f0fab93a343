"""One sentence about whether it pays, and what would help. Pure."""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from daskdl.planning.costs import Costs, Measured
from daskdl.planning.network import Network
from daskdl.planning.prediction import Prediction, predict
from daskdl.training.gradient_sharing import GradientSharing

PAYS = 0.5  # an efficiency from which on workers pay: half of each is used
CARRIED = 0.5  # with fewer of the exchanges, replicas hardly learn from each other
LONGER = (4, 16)  # steps between exchanges, or batches in a step, that are looked at
SPARSER = 10  # so many times fewer entries are looked at


@dataclass(frozen=True)
class Question:
    """For whom advice is wanted.

    Attributes:
        measured: What a step and an exchange cost.
        master: How updates are shared.
        link: Between the machines; None: all on one.
        workers: Numbers of workers, ascending.
    """

    measured: Measured
    master: GradientSharing
    link: Network | None
    workers: tuple[int, ...]

    def answers(self) -> tuple[Prediction, ...]:
        """What is to be expected, one for each number of workers."""
        return tuple(
            predict(self.measured, self.master, self.link, count)
            for count in self.workers
        )

    def costing(self, change: Callable[[Costs], Costs]) -> "Question":
        """The same with other costs."""
        return dataclasses.replace(self, measured=self.measured.changed(change))


def advise(question: Question) -> str:
    """Say up to how many workers it pays, and what would make more of them pay."""
    rows = question.answers()
    several = [row for row in rows if row.workers > 1]
    if not several:
        return "One worker sends nothing: ask for more to see whether they pay."
    paying = _paying(rows)
    if paying == several[-1]:
        return f"Pays up to {_as_fast(paying)}; nothing was asked about more."
    after = 1 if paying is None else paying.workers
    refused = next(row for row in several if row.workers > after)
    cause = f"{_limit(refused)} at {refused.workers} workers"
    if paying is None:
        best = max(several, key=lambda row: row.samples_per_s)
        verdict = "Does not pay" if best.speed <= 1 else "Hardly pays"
        said = f"{verdict}: {_as_fast(best)} at best; {cause}."
    else:
        said = f"Pays up to {_as_fast(paying)}; then {cause}."
    remedies = list(_remedies(question, paying))
    if not remedies:
        return f"{said} {_nothing_helps(question)}"
    return f"{said} It would pay up to {', '.join(remedies)}."


def _pays(row: Prediction) -> bool:
    return row.efficiency >= PAYS and row.carried >= CARRIED and row.speed > 1


def _paying(rows: Sequence[Prediction]) -> Prediction | None:
    """The most workers that pay; None if no second one does."""
    pays = [row for row in rows if row.workers > 1 and _pays(row)]
    return pays[-1] if pays else None


def _as_fast(row: Prediction) -> str:
    return f"{row.workers} workers, {row.speed:.2g} times as fast as one"


def _limit(row: Prediction) -> str:
    if row.carried < CARRIED:
        return f"the {row.limit} carries {row.carried:.0%} of the exchanges"
    return f"the limit is {row.limit!r}, and the efficiency {row.efficiency:.1%}"


def _remedies(question: Question, paying: Prediction | None) -> Iterator[str]:
    """What would make more workers pay, and how many: the mildest of each kind."""
    now = 1 if paying is None else paying.workers
    for kind in _changes(question):
        for how, changed in kind:
            better = _paying(changed.answers())
            if better is not None and better.workers > now:
                yield f"{better.workers} with {how}"
                break


def _changes(question: Question) -> Iterator[list[tuple[str, Question]]]:
    yield [_exchanging_less(question, factor) for factor in LONGER]
    yield [
        (
            f"{n} times the batch (accumulate={n})",
            question.costing(operator.methodcaller("accumulated", n)),
        )
        for n in LONGER
    ]
    density = question.measured.alone.density
    yield [
        (
            f"a density of {density / SPARSER:.0e} instead of {density:.0e}",
            question.costing(operator.methodcaller("thinned", SPARSER)),
        )
    ]


def _exchanging_less(question: Question, factor: int) -> tuple[str, Question]:
    every = factor * question.master.exchange_every
    master = dataclasses.replace(question.master, exchange_every=every)
    changed = question.costing(operator.methodcaller("gathered", factor))
    return f"exchange_every={every}", dataclasses.replace(changed, master=master)


def _nothing_helps(question: Question) -> str:
    every = question.master.exchange_every * LONGER[-1]
    return (
        f"Neither exchange_every={every} nor {LONGER[-1]} times the batch nor a tenth "
        "of the density would change that."
    )
