import os
import pickle
import re
import signal
import subprocess
import sys
import time

import pytest

from daskdl.callbacks import FailureInjection, Step
from daskdl.errors import OptionError


def step(replica=0, number=1):
    return Step(replica, 0, number, loss=0.5, examples=8, learning_rate=0.1)


def struck(rule, replica=0, receiver=None, numbers=range(1, 101)):
    return [number for number in numbers if rule.strikes(replica, number, receiver)]


class TestWhen:
    def test_without_a_choice_every_step_of_every_replica(self):
        assert struck(FailureInjection("raise"), replica=7) == list(range(1, 101))

    def test_only_the_chosen_steps_of_the_chosen_replicas(self):
        rule = FailureInjection("raise", replicas=[1, 3], steps=range(4, 6))

        assert [struck(rule, replica) for replica in range(4)] == [
            [],
            [4, 5],
            [],
            [4, 5],
        ]

    def test_chance_is_as_likely_as_it_says(self):
        rule = FailureInjection("drop", probability=0.2)

        # 10,000 draws: the standard deviation is 40.
        assert abs(len(struck(rule, numbers=range(1, 10_001))) - 2000) < 200

    def test_chance_is_repeated_from_the_seed(self):
        rule = FailureInjection("drop", probability=0.2, seed=3)

        assert struck(rule) == struck(pickle.loads(pickle.dumps(rule)))
        assert struck(rule)[:5] == [6, 14, 15, 18, 20]

    @pytest.mark.parametrize(
        ("seed", "replica", "receiver"),
        [(4, 0, 1), (3, 1, 1), (3, 0, 2), (3, 0, None)],
    )
    def test_another_seed_replica_or_receiver_has_another_chance(
        self, seed, replica, receiver
    ):
        one = FailureInjection("drop", probability=0.2, seed=3)
        other = FailureInjection("drop", probability=0.2, seed=seed)

        assert struck(one, 0, 1) != struck(other, replica, receiver)

    def test_chance_is_limited_to_the_chosen_steps(self):
        rule = FailureInjection("sleep", seconds=1, steps=[2, 4, 6], probability=0.5)

        assert set(struck(rule)) <= {2, 4, 6}

    @pytest.mark.parametrize("options", [{}, {"probability": 0.2}], ids=str)
    def test_the_number_of_times_ends_it_for_each_replica(self, options):
        rule = FailureInjection("raise", times=2, **options)
        unbounded = FailureInjection("raise", **options)

        for replica in (0, 1):
            assert struck(rule, replica) == struck(unbounded, replica)[:2]


class TestWhat:
    def test_to_raise_says_where_and_which_rule(self):
        rule = FailureInjection("raise", replicas=[1], steps=[3])

        rule.on_step_end(step(1, 2))
        with pytest.raises(RuntimeError) as caught:
            rule.on_step_end(step(1, 3))

        assert str(caught.value) == (
            "replica 1 fails at step 3, as FailureInjection(kind='raise', "
            "replicas=[1], steps=[3], probability=1.0, times=None, seconds=None, "
            "seed=0) says"
        )

    def test_to_sleep_is_to_wait_so_long_and_go_on(self, monkeypatch):
        slept = []
        monkeypatch.setattr(time, "sleep", slept.append)
        rule = FailureInjection("sleep", seconds=2.5, steps=[2])

        for number in (1, 2, 3):
            rule.on_step_end(step(number=number))

        assert slept == [2.5]

    def test_to_drop_does_nothing_in_a_step(self):
        assert FailureInjection("drop").on_step_end(step()) is None

    @pytest.mark.parametrize("kind", ["exit", "freeze"])
    def test_the_process_it_was_made_in_is_spared(self, kind):
        message = f"kind='{kind}' would hit the client's own process"

        with pytest.raises(OptionError, match=re.escape(message)):
            FailureInjection(kind).on_step_end(step())

    def test_a_process_stops_until_it_is_told_to_go_on_or_some_time_and_then_ends(self):
        child = subprocess.Popen(
            [sys.executable, "-c", STRUCK],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, status = os.waitpid(child.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
        finally:
            os.kill(child.pid, signal.SIGCONT)
        _, status = os.waitpid(child.pid, os.WUNTRACED)  # it goes on by itself
        assert os.WIFSTOPPED(status)

        printed, errors = child.communicate(timeout=60)

        assert (printed, errors) == ("goes on\ngoes on\n", "")  # and no "end"
        assert child.returncode == 1


# The rules are those of another process, so that they strike.
STRUCK = f"""
import atexit, pickle
from daskdl.callbacks import Step
atexit.register(print, "end")
for kind in ({pickle.dumps(FailureInjection("freeze"))!r},
             {pickle.dumps(FailureInjection("freeze", seconds=0.2))!r},
             {pickle.dumps(FailureInjection("exit"))!r}):
    pickle.loads(kind).on_step_end(Step(0, 0, 1, 0.5, 8, 0.1))
    print("goes on", flush=True)
"""


WRONG = [
    ({"kind": "explode"}, "kind must be one of 'raise', 'exit', 'sleep', 'freeze', 'd"),
    ({"replicas": 1}, "replicas must be a list of whole numbers >= 0 or None, got 1; "),
    ({"replicas": 1}, "; write [1]"),
    ({"replicas": "1"}, "replicas must be a list of whole numbers >= 0 or None, got '"),
    ({"replicas": []}, "replicas must not be empty; for all of them give None"),
    ({"replicas": [0, -1]}, "replicas must be whole numbers >= 0, got -1 among them"),
    ({"steps": [0]}, "steps must be whole numbers >= 1, got 0 among them"),
    ({"steps": [True]}, "steps must be whole numbers >= 1, got True among them"),
    ({"steps": 0}, "steps must be a list of whole numbers >= 1 or None, got 0"),
    ({"probability": 0}, "probability must be in (0, 1], got 0; to spare some"),
    ({"probability": 1.5}, "probability must be in (0, 1], got 1.5"),
    ({"probability": True}, "probability must be in (0, 1], got True"),
    ({"probability": float("nan")}, "probability must be in (0, 1], got nan"),
    ({"times": 0}, "times must be a whole number >= 1 or None, got 0"),
    ({"times": 1.0}, "times must be a whole number >= 1 or None, got 1.0"),
    ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
    ({"seconds": 1}, "seconds is for 'sleep' and 'freeze' only, got 1 with 'raise'; l"),
    ({"kind": "sleep"}, "seconds must be a number > 0, got None"),
    ({"kind": "sleep", "seconds": 0}, "seconds must be a number > 0, got 0"),
    ({"kind": "freeze", "seconds": -1}, "seconds must be a number > 0 or None, got -1"),
    (
        {"kind": "freeze", "seconds": float("inf")},
        "seconds must be a number > 0 or None, got inf",
    ),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(o) for o, _ in WRONG])
def test_what_is_not_allowed_is_refused_by_name(options, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        FailureInjection(**{"kind": "raise", **options})


@pytest.mark.parametrize("kind", ["raise", "exit", "drop", "freeze"])
def test_it_is_a_plain_value_that_runs_on_workers(kind):
    rule = FailureInjection(kind, replicas=[1], steps=[2])

    assert pickle.loads(pickle.dumps(rule)) == rule
    assert rule.runs_on_workers
