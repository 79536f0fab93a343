"""The channel's decisions among up to 64 replicas, on a network as bad as can be.

The network reorders, repeats and loses messages; replicas join and are lost, in
the middle of a flood and of a repair. At every barrier the survivors must have applied
the same updates, each once, and all of each other.
"""

import random
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from daskdl.channel.inbox import DeliveryBarrier, ReceivedSet, missing
from daskdl.channel.protocol import MESSAGE_BYTES, MeshTopology, Message, MessageKind
from daskdl.channel.recovery import donors, helpers, settle
from daskdl.channel.routing import TopologyHistory
from daskdl.channel.transport import RetransmitBuffer

MOST = 64
OWN = 6  # updates a replica keeps of its own, and has unconfirmed at most
LARGE = 10**6
WEIGHT = 100 + MESSAGE_BYTES


class Sent(NamedTuple):
    """One message under way."""

    sender: int
    receiver: int
    generation: int | None  # None: an answer, which nobody forwards
    what: Message | MeshTopology


class Member:
    """One replica: the real parts, and which updates it has applied."""

    def __init__(self, number, ring_items):
        self.number = number
        self.published = 0
        self.book = TopologyHistory(kept=3)
        self.positions = ReceivedSet()
        self.fence = DeliveryBarrier()
        self.own = RetransmitBuffer(OWN * WEIGHT)
        self.others = RetransmitBuffer(ring_items * WEIGHT)
        self.applied = set()

    def take(self, item):
        """Apply an update unless it may not be; whether it was."""
        if not self.fence.admits(item.origin, item.sequence):
            return False
        if not self.positions.accept(item.origin, item.sequence):
            return False
        assert (item.origin, item.sequence) not in self.applied
        self.applied.add((item.origin, item.sequence))
        ring = self.own if item.origin == self.number else self.others
        ring.keep(item)
        return True

    def find(self, origin, sequences):
        ring = self.own if origin == self.number else self.others
        return ring.find(origin, sequences)

    def take_state(self, donor):
        """A snapshot: the vector that the donor's updates add up to, and which."""
        self.positions = ReceivedSet(donor.positions.by_origin())
        self.applied = set(donor.applied)


class Crowd:
    """The replicas of one run, the network, and what the scheduler knows."""

    def __init__(self, count, fan_out, ring_items):
        self.fan_out = fan_out
        self.ring_items = ring_items
        self.generation = 0
        self.under_way = []
        self.published = set()
        self.members = {n: Member(n, ring_items) for n in range(count)}
        self.next_number = count
        self.in_rings = ring_items == LARGE  # all that is not agreed on yet
        self.reachable = True  # somebody had the whole target, at the last barrier
        self.deaths = 0  # still to come in the barrier at hand
        self._change()
        self.adopt()

    @property
    def routes(self):
        return MeshTopology(self.generation, tuple(sorted(self.members)), self.fan_out)

    def told(self):
        return {n: m.positions.by_origin() for n, m in self.members.items()}

    def adopt(self):
        for member in self.members.values():
            member.book.adopt(self.routes)

    def _change(self):
        self.generation += 1
        for number in self.members:
            self.under_way.append(Sent(-1, number, None, self.routes))

    def join(self, donor):
        member = Member(self.next_number, self.ring_items)
        self.next_number += 1
        member.take_state(self.members[donor])
        self.in_rings = False  # what a snapshot brought is in no ring
        self.members[member.number] = member
        self._change()
        member.book.adopt(self.routes)

    def lose(self, number, chance):
        """It is gone, and any part of what it was sending with it."""
        del self.members[number]
        self.under_way = [
            sent
            for sent in self.under_way
            if sent.sender != number or chance.random() < 0.5
        ]
        self._change()

    def publish(self, number):
        """One more update, unless too many of its own are unconfirmed."""
        member = self.members[number]
        everywhere = min(m.positions.complete(number) for m in self.members.values())
        if member.published - everywhere >= OWN:
            return
        member.published += 1
        self.published.add((number, member.published))
        item = Message(MessageKind.UPDATE, number, member.published, 0, 100)
        assert member.take(item)
        self._forward(member, member.book.current.generation, item)

    def _forward(self, member, generation, item):
        routes = member.book.for_generation(generation)
        for child in routes.children(item.origin, member.number):
            self.under_way.append(Sent(member.number, child, generation, item))

    def draw(self, chance):
        """Take any message off the network."""
        at = chance.randrange(len(self.under_way))
        self.under_way[at], self.under_way[-1] = self.under_way[-1], self.under_way[at]
        return self.under_way.pop()

    def deliver(self, chance, count):
        for _ in range(min(count, len(self.under_way))):
            sent = self.draw(chance)
            member = self.members.get(sent.receiver)
            if member is None:
                continue
            if isinstance(sent.what, MeshTopology):
                member.book.adopt(sent.what)
            elif member.take(sent.what) and sent.generation is not None:
                self._forward(member, sent.generation, sent.what)

    # ---- repair

    def ask(self, asker):
        """In the middle of training: the answers come when they come."""
        told = self.told()
        for origin, sequences in missing(told[asker], settle(told)).items():
            for helper in helpers(origin, sequences, told, self.members, asker)[:2]:
                found = self.members[helper].find(origin, sequences)
                self.under_way += [Sent(helper, asker, None, item) for item in found]

    def agree(self, chance, deaths):
        """A barrier; returns what the last to survive it had applied, all of them."""
        self.deaths = deaths
        while True:
            self.adopt()
            survivors = set(self.members)
            everything = set().union(*(m.applied for m in self.members.values()))
            self._pull_all(chance)
            if set(self.members) == survivors:
                self._take_states(chance)
            if set(self.members) == survivors:
                for member in self.members.values():
                    member.fence.release()
                return everything

    def _pull_all(self, chance):
        self._close()
        told = self.told()
        target = settle(told)
        for member in self.members.values():
            member.fence.open(target)
        self._each(chance, lambda asker: self._pull(asker, told, target))

    def _take_states(self, chance):
        self._close()
        told = self.told()
        target = settle(told)
        self.reachable = any(not missing(mine, target) for mine in told.values())
        self._each(chance, lambda asker: self._take_state(asker, told))

    def _close(self):
        for member in self.members.values():
            member.fence.hold()

    def _each(self, chance, act):
        """Every member acts, in any order; meanwhile messages come, members go."""
        for number in chance.sample(sorted(self.members), len(self.members)):
            self.deliver(chance, chance.randrange(4))
            if self.deaths and len(self.members) > 1 and chance.random() < 0.2:
                self.lose(chance.choice(sorted(self.members)), chance)
                self.deaths -= 1
            if number in self.members:
                act(number)

    def _pull(self, asker, told, target):
        member = self.members[asker]
        for origin, sequences in missing(told[asker], target).items():
            for helper in helpers(origin, sequences, told, self.members, asker):
                for item in self.members[helper].find(origin, sequences):
                    member.take(item)
                if not missing(member.positions.by_origin(), {origin: target[origin]}):
                    break

    def _take_state(self, asker, told):
        alive = [n for n in donors(told, asker) if n in self.members]
        if alive:
            assert not self.in_rings
            self.members[asker].take_state(self.members[alive[0]])

    def check(self, everything):
        """What must hold when a barrier was passed."""
        first, *rest = (member.applied for member in self.members.values())
        assert all(applied == first for applied in rest)
        vectors = [_ranges(told) for told in self.told().values()]
        assert all(vector == first for vector in vectors)
        assert {u for u in self.published if u[0] in self.members} <= first
        assert first <= everything <= self.published
        assert self.reachable or not self.in_rings
        if self.reachable:
            assert first == everything
        self.in_rings = self.ring_items == LARGE


def _ranges(received):
    return {
        (origin, sequence)
        for origin, (complete, beyond) in received.items()
        for sequence in [*range(1, complete + 1), *beyond]
    }


SEEDS = st.integers(0, 2**32 - 1)
FAN_OUTS = st.sampled_from([1, 2, 3, 8])
RINGS = st.sampled_from([0, 2, 10, LARGE])


class ChannelMachine(RuleBasedStateMachine):
    """Anything that may happen, in any order."""

    @rule(seed=SEEDS, count=st.integers(1, 20))
    def publish(self, seed, count):
        chance = random.Random(seed)
        for number in chance.choices(sorted(self.crowd.members), k=count):
            self.crowd.publish(number)

    @rule(seed=SEEDS, count=st.integers(1, 500))
    def deliver(self, seed, count):
        self.crowd.deliver(random.Random(seed), count)

    @rule(seed=SEEDS, count=st.integers(1, 30))
    def repeat(self, seed, count):
        if self.crowd.under_way:
            chosen = random.Random(seed).choices(self.crowd.under_way, k=count)
            self.crowd.under_way += chosen

    @rule(seed=SEEDS, count=st.integers(1, 30))
    def drop(self, seed, count):
        chance = random.Random(seed)
        for _ in range(min(count, len(self.crowd.under_way))):
            self.crowd.draw(chance)

    @rule(seed=SEEDS, count=st.integers(1, 4), last=st.integers(0, 3))
    def lose(self, seed, count, last):
        """Some go, in the middle of sending the last they published."""
        chance = random.Random(seed)
        members = sorted(self.crowd.members)
        leaving = chance.sample(members, min(count, len(members) - 1))
        for number in leaving * last:
            self.crowd.publish(number)
        self.crowd.deliver(chance, chance.randrange(2 * len(members)))
        for number in leaving:
            self.crowd.lose(number, chance)

    @precondition(lambda self: len(self.crowd.members) < MOST)
    @rule(seed=SEEDS)
    def join(self, seed):
        self.crowd.join(random.Random(seed).choice(sorted(self.crowd.members)))

    @rule(seed=SEEDS)
    def ask(self, seed):
        self.crowd.ask(random.Random(seed).choice(sorted(self.crowd.members)))

    @rule(seed=SEEDS, deaths=st.integers(0, 3))
    def pass_a_barrier(self, seed, deaths):
        everything = self.crowd.agree(random.Random(seed), deaths)
        self.crowd.check(everything)

    def teardown(self):
        if hasattr(self, "crowd"):
            self.pass_a_barrier(0, 0)


class Few(ChannelMachine):
    """So few that most send to all, and that most shapes of a loss come up."""

    @initialize(count=st.integers(1, 12), fan_out=FAN_OUTS, ring_items=RINGS)
    def start(self, count, fan_out, ring_items):
        self.crowd = Crowd(count, fan_out, ring_items)


class Many(ChannelMachine):
    """Trees of several levels, up to the most replicas there may be."""

    @initialize(count=st.integers(13, MOST), fan_out=FAN_OUTS, ring_items=RINGS)
    def start(self, count, fan_out, ring_items):
        self.crowd = Crowd(count, fan_out, ring_items)


SETTINGS = settings(stateful_step_count=50, derandomize=True)

TestFew, TestMany = Few.TestCase, Many.TestCase
TestFew.settings = settings(SETTINGS, max_examples=60)
TestMany.settings = settings(SETTINGS, max_examples=8)
