"""Trees of a mesh: every member once, even while the membership changes."""

import heapq
import random
from collections import Counter

import pytest

from daskdl.channel.protocol import MeshTopology
from daskdl.channel.routing import TopologyHistory

COUNTS = [*range(1, 34), 63, 64, 65, 72, 73, 74, 127, 128]


def members_of(count):
    return tuple(3 * i + i % 2 for i in range(count))  # neither dense nor from 0


class Flood:
    """A simulation of updates and new memberships in flight.

    Every copy is forwarded, so that a second copy of an update is noticed.
    """

    def __init__(self, books, seed):
        self.books = books
        self.arrived = Counter()  # copies, by (origin, sequence, node)
        self.sent = Counter()  # by node
        self._random = random.Random(seed)
        self._events = []
        self._now = 0.0

    def adopt(self, node, routes, delay):
        self._after(delay, node, routes)

    def publish(self, origin, sequence):
        self._pass_on(origin, sequence, self.books[origin].current.generation, origin)

    def run(self):
        while self._events:
            self._now, _, node, what = heapq.heappop(self._events)
            if isinstance(what, MeshTopology):
                self.books[node].adopt(what)
                continue
            origin, sequence, generation = what
            self.arrived[origin, sequence, node] += 1
            assert self.arrived[origin, sequence, node] < 5, "it circles"
            self._pass_on(origin, sequence, generation, node)

    def _pass_on(self, origin, sequence, generation, node):
        routes = self.books[node].for_generation(generation)
        for child in routes.children(origin, node):
            self.sent[node] += 1
            delay = self._random.expovariate(1.0)
            self._after(delay, child, (origin, sequence, generation))

    def _after(self, delay, node, what):
        tie = self._random.random()
        heapq.heappush(self._events, (self._now + delay, tie, node, what))


def once_each(origins, members):
    """One copy of the update of each origin at each other member."""
    return {(origin, 1, n): 1 for origin in origins for n in members if n != origin}


def books_for(routes, nodes):
    books = {node: TopologyHistory() for node in nodes}
    for book in books.values():
        book.adopt(routes)
    return books


@pytest.mark.parametrize("fan_out", [1, 2, 3, 8])
def test_every_update_reaches_every_member_exactly_once(fan_out):
    for count in range(1, 129):
        members = members_of(count)
        # Every origin of every count takes 10 s for each fan-out.
        origins = members if count in COUNTS[::7] else members[:: 1 + count // 4]
        routes = MeshTopology(1, members, fan_out)
        flood = Flood(books_for(routes, members), seed=count)
        for origin in origins:
            flood.publish(origin, 1)
        flood.run()

        assert flood.arrived == once_each(origins, members)


@pytest.mark.parametrize("fan_out", [1, 2, 3, 8, 200])
def test_the_heaviest_member_sends_at_most_a_fifth_more_than_the_mean(fan_out):
    for count in COUNTS[1:]:
        members = members_of(count)
        routes = MeshTopology(1, members, fan_out)

        children = [
            [len(routes.children(origin, node)) for origin in members]
            for node in members
        ]

        assert max(map(max, children)) <= fan_out
        sent = [sum(counts) for counts in children]
        assert max(sent) <= 1.2 * sum(sent) / count


# ---- generations


@pytest.mark.parametrize("seed", range(20))
def test_a_change_of_membership_loses_no_update_in_flight(seed):
    chance = random.Random(seed)
    nodes = range(chance.randint(3, 80))
    generations = []
    for generation in range(1, 5):
        members = tuple(n for n in nodes if chance.random() < 0.8)
        generations.append(
            MeshTopology(generation, members, chance.choice([1, 2, 3, 8]))
        )
    flood = Flood(books_for(generations[0], nodes), seed)

    # Later memberships arrive while frames of the first are in flight.
    for routes in generations[1:]:
        for node in nodes:
            flood.adopt(node, routes, chance.uniform(0, 4))
    for origin in generations[0].members:
        flood.publish(origin, 1)
    flood.run()

    first = generations[0].members
    assert flood.arrived == once_each(first, first)
    assert {book.current for book in flood.books.values()} == {generations[-1]}


def test_an_older_generation_is_kept_as_first_received_and_is_not_current():
    older, newer = MeshTopology(3, (0, 1)), MeshTopology(5, (0, 1, 2))
    book = TopologyHistory()

    for routes in (newer, older, MeshTopology(3, (0, 1, 9))):
        book.adopt(routes)

    assert book.current == newer
    assert book.for_generation(3) == older
