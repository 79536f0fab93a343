"""The channel's decisions together, under anything: see `crowds`.

At every barrier the survivors must have applied the same updates, each once, and
all of each other.
"""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.support.crowds import LARGE, MOST, Crowd

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
TestFew.settings = settings(SETTINGS, max_examples=150)
TestMany.settings = settings(SETTINGS, max_examples=15)
