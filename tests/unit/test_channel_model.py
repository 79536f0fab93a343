"""The channel's decisions together, under anything: see `crowds`.

At every barrier the survivors must have applied the same updates, each once, and
all of each other.
"""

import random

from crowds import LARGE, MOST, Crowd
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

SEEDS = st.integers(0, 2**32 - 1)
COUNTS = st.sampled_from([1, 2, 3, 4, 5, 6, 9, 10, 12, 17, 25, 40, MOST])


class ChannelMachine(RuleBasedStateMachine):
    """Anything that may happen, in any order."""

    @initialize(
        count=COUNTS,
        fan_out=st.sampled_from([1, 2, 3, 8]),
        ring_items=st.sampled_from([0, 2, 10, LARGE]),
    )
    def start(self, count, fan_out, ring_items):
        self.crowd = Crowd(count, fan_out, ring_items)

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

    @rule(seed=SEEDS, count=st.integers(1, 4))
    def lose(self, seed, count):
        chance = random.Random(seed)
        for _ in range(min(count, len(self.crowd.members) - 1)):
            self.crowd.lose(chance.choice(sorted(self.crowd.members)), chance)

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
        for member in self.crowd.members.values():
            for origin in self.crowd.lost:
                member.others.forget(origin)

    def teardown(self):
        if hasattr(self, "crowd"):
            self.pass_a_barrier(0, 0)


TestChannel = ChannelMachine.TestCase
TestChannel.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
