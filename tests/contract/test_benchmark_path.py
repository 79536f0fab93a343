"""What the benchmark of calls counts as one."""

import asyncio
import sys
from collections import Counter

import pytest

from benchmarks.path import Calls

SOURCE = """
import asyncio

def plain():
    return [square(x) for x in range(3)], {x for x in range(3)}, sum(x for x in "")

square = lambda x: x * x

def three():
    yield from range(3)

async def twice():
    await asyncio.sleep(0)
    await asyncio.sleep(0)

class Made:
    @property
    def one(self):
        return 1

def maker():
    class Inner:
        number = plain()
    return Inner
"""


@pytest.fixture
def module():
    """One whose code is compiled as that of a module of daskdl is."""
    names = {"__name__": "daskdl.made"}
    exec(SOURCE, names)
    return names


def counted(work, patterns=()):
    calls = Calls(list(patterns) or ["nothing"])
    calls.counting = True
    former = sys.getprofile()
    sys.setprofile(calls.profile)
    try:
        work()
    finally:
        sys.setprofile(former)
    return calls.thread()


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda m: m["plain"](), {"plain": 1, "<lambda>": 3}),
        (lambda m: list(m["three"]()), {"three": 1}),
        (lambda m: asyncio.run(m["twice"]()), {"twice": 1}),
        (lambda m: m["Made"]().one, {"Made.one": 1}),
        (lambda m: m["maker"](), {"maker": 1, "plain": 1, "<lambda>": 3}),
        (lambda m: exec(SOURCE, {"__name__": "daskdl.made"}), {}),
    ],
    ids=["comprehensions", "generator", "coroutine", "property", "class", "module"],
)
def test_a_call_is_the_start_of_a_function(module, work, expected):
    thread = counted(lambda: work(module))

    assert thread.calls == Counter({("daskdl.made", n): k for n, k in expected.items()})


@pytest.mark.parametrize("name", ["daskdlmade", "benchmarks.daskdl", "__main__"])
def test_functions_of_other_packages_are_not_counted(module, name):
    module["__name__"] = name

    assert counted(module["plain"]).calls == {}


def test_callers_are_counted_of_functions_that_were_asked_for(module):
    thread = counted(module["plain"], [r"lambda", r"\bnone$"])

    assert thread.callers == {("daskdl.made.<lambda>", "daskdl.made.plain"): 3}


def test_a_step_that_was_not_counted_from_its_start_is_left_out(module):
    thread = counted(module["plain"])

    thread.begin_step()
    thread.calls["daskdl.made", "plain"] = 7
    thread.begin_step()

    assert thread.steps == [{("daskdl.made", "plain"): 7}]
