import heapq
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.channel.protocol import MeshTopology
from daskdl.channel.routing import TopologyHistory

COUNTS = [*range(1, 34), 63, 64, 65, 72, 73, 74, 127, 128]
MEMBERS = st.lists(st.integers(0, 200), unique=True, max_size=128).map(
    lambda members: tuple(sorted(members))
)


def members_of(count):
    return tuple(3 * i + i % 2 for i in range(count))  # neither dense nor from 0


class Flood:
    """Discrete events: updates under way, and words about a new generation.

    Forwarding is naive, every copy goes on: what arrives twice is seen.
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

    def run(self, until=float("inf")):
        while self._events and self._events[0][0] <= until:
            self._now, _, node, what = heapq.heappop(self._events)
            if isinstance(what, MeshTopology):
                self.books[node].adopt(what)
                continue
            origin, sequence, generation = what
            self.arrived[origin, sequence, node] += 1
            assert self.arrived[origin, sequence, node] < 5, "it goes round in circles"
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


def books_for(routes, nodes):
    books = {node: TopologyHistory() for node in nodes}
    for book in books.values():
        book.adopt(routes)
    return books


def flooded(members, fan_out, origins=None):
    flood = Flood(
        books_for(MeshTopology(1, members, fan_out), members), seed=len(members)
    )
    for origin in members if origins is None else origins:
        flood.publish(origin, 1)
    flood.run()
    return flood


def everybody_once(members, origins=None):
    every = members if origins is None else origins
    return {(origin, 1, n): 1 for origin in every for n in members if n != origin}


@pytest.mark.parametrize("fan_out", [1, 2, 3, 8])
def test_every_update_reaches_every_member_exactly_once(fan_out):
    for count in range(1, 129):
        members = members_of(count)
        # Every origin of every count takes 10 s for each fan-out.
        all_origins = count in COUNTS[:: 1 if fan_out == 8 else 7]
        origins = members if all_origins else members[:: 1 + count // 4]

        flood = flooded(members, fan_out, origins)

        assert flood.arrived == everybody_once(members, origins)


@pytest.mark.parametrize("fan_out", [1, 2, 3, 8, 200])
def test_the_heaviest_member_sends_at_most_a_fifth_more_than_the_mean(fan_out):
    for count in COUNTS[1:]:
        members = members_of(count)
        routes = MeshTopology(1, members, fan_out)

        sent = [
            sum(len(routes.children(origin, node)) for origin in members)
            for node in members
        ]

        assert max(sent) <= 1.2 * sum(sent) / count


@given(MEMBERS, st.integers(1, 10))
def test_each_member_hangs_once_in_each_tree(members, fan_out):
    routes = MeshTopology(1, members, fan_out)

    for origin in members[:5]:
        trees = [routes.children(origin, node) for node in members]
        assert all(len(children) <= fan_out for children in trees)
        hanging = sorted(child for children in trees for child in children)
        assert hanging == [m for m in members if m != origin]


# ---- generations


@pytest.mark.parametrize("seed", range(20))
def test_a_change_in_the_middle_of_a_flood_loses_nothing_for_who_is_in_both(seed):
    chance = random.Random(seed)
    nodes = range(chance.randint(3, 80))
    generations = []
    for generation in range(1, 5):
        members = tuple(n for n in nodes if chance.random() < 0.8)
        generations.append(
            MeshTopology(generation, members, chance.choice([1, 2, 3, 8]))
        )
    flood = Flood(books_for(generations[0], nodes), seed)

    # Words of the later generations come while frames of the first are under way,
    # to some before they forward them and to some after.
    for routes in generations[1:]:
        for node in nodes:
            flood.adopt(node, routes, chance.uniform(0, 4))
    for origin in generations[0].members:
        flood.publish(origin, 1)
    flood.run()

    assert flood.arrived == everybody_once(generations[0].members)
    assert {book.current for book in flood.books.values()} == {generations[-1]}


def test_an_older_generation_is_kept_and_does_not_become_current():
    older, newer = MeshTopology(3, (0, 1)), MeshTopology(5, (0, 1, 2))
    book = TopologyHistory()

    adopted = [book.adopt(newer), book.adopt(older), book.adopt(newer)]

    assert adopted == [True, False, False]
    assert book.current == newer
    assert book.for_generation(3) == older
