"""Modules and calls of one update, from a batch to the parameters of other replicas.

Question: How many modules and how many function calls does an update pass through?
Counted:  Calls of functions of daskdl, by `sys.setprofile` in all threads, while two
          workers in this process train a linear model on different rows and exchange at
          each step. A step of a replica is the time from one forward pass in its thread
          to the next. Counting starts once each replica has made `SKIPPED` steps, and
          ends when one of them has made `--steps` more. A generator or coroutine counts
          when it first runs, not when it is resumed. Not counted: bodies of modules and
          classes, comprehensions and generator expressions, and compiled code. Numbers
          per update are divided by the steps of both replicas, since each step
          publishes one update and applies about one. A replica pauses at each forward
          pass, so that updates travel one by one. A module is on the path if one of its
          functions is called at least once in two updates; others (heartbeats, leases,
          telemetry, progress) are listed apart.
          Two replicas on threads of this process, with ``client=False``, train the same
          model: once with an exchange in each step, and once with intervals that they
          choose, where only steps without an exchange count.
Run:      python -m benchmarks path --top 20
"""

import contextlib
import functools
import inspect
import opcode
import platform
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from types import CodeType, FrameType
from typing import Any, Literal

import numpy as np
import torch
from distributed import Client, LocalCluster
from torch import nn

import daskdl
from benchmarks.results import parser_of

REPLICAS, BATCH, FEATURES, OUTPUTS = 2, 16, 64, 16
SKIPPED = 30  # steps of each replica before any is counted
PAUSE_S = 0.008
ON_PATH = 0.5  # calls per update of one function
INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
START = bytes([opcode.opmap["RESUME"], 0])

Function = tuple[str, str]  # module, qualified name
PUBLISH: Function = ("daskdl.channel.base", "Channel.publish")


@dataclass(eq=False)
class Thread:
    """Calls of one thread."""

    forwards: int = 0  # passes through the model, counted or not
    steps: list[Counter[Function]] = field(default_factory=list)  # calls of each
    calls: Counter[Function] = field(default_factory=Counter)  # since the last step
    stepping: bool = False  # all of the present step is counted

    def begin_step(self) -> None:
        if self.stepping:
            self.steps.append(self.calls)
        self.calls, self.stepping = Counter(), True


class Calls:
    """Counts calls of functions of daskdl in each thread, while `counting`."""

    def __init__(self) -> None:
        self.counting = False
        self.threads: list[Thread] = []
        self._own = threading.local()
        # By id: two functions of the same code in different modules are equal.
        self._known: dict[int, tuple[CodeType, Function | None]] = {}

    def thread(self) -> Thread:
        """The current thread."""
        if not hasattr(self._own, "thread"):
            self._own.thread = Thread()
            self.threads.append(self._own.thread)
        return self._own.thread

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Called by `sys.setprofile`."""
        if event != "call" or not self.counting:
            return
        code, at = frame.f_code, frame.f_lasti
        if id(code) not in self._known:
            module, name = frame.f_globals.get("__name__", ""), code.co_qualname
            of_daskdl = (
                f"{module}.".startswith("daskdl.") and code.co_name not in INLINED
            )
            function = of_daskdl and code.co_flags & inspect.CO_NEWLOCALS
            self._known[id(code)] = code, (module, name) if function else None
        _, function = self._known[id(code)]
        resumed = code.co_flags & RESUMABLE and code.co_code[at : at + 2] != START
        if function is not None and not resumed:
            self.thread().calls[function] += 1


@contextlib.contextmanager
def cluster() -> Iterator[Client]:
    """Client of a cluster with workers in this process."""
    with (
        LocalCluster(
            n_workers=REPLICAS,
            processes=False,
            threads_per_worker=1,
            dashboard_address=None,
        ) as workers,
        Client(workers, set_as_default=False) as client,
    ):
        yield client


def counted(
    place: AbstractContextManager[Client | Literal[False]],
    steps: int,
    pause_s: float,
    **options: Any,
) -> Calls:
    """Calls of a fit.

    Args:
        place: Gives the `client` of the trainer. Entered when calls are profiled.
        steps: Steps to count, per replica.
        pause_s: Pause at each forward pass, in seconds.
        options: Of `GradientSharing`.
    """
    calls, lock, ready = Calls(), threading.Lock(), set()

    def forward(module: nn.Module, _: object) -> None:
        if not isinstance(module, nn.Linear):
            return  # losses are modules, too
        thread = calls.thread()
        with lock:
            thread.forwards += 1
            if calls.counting:
                thread.begin_step()
                calls.counting = len(thread.steps) < steps
            elif thread.forwards == SKIPPED:
                ready.add(thread)
                calls.counting = len(ready) == REPLICAS
        if calls.counting or thread.forwards <= SKIPPED:
            time.sleep(pause_s)

    rng = np.random.default_rng(0)
    rows = REPLICAS * (2 * SKIPPED + 5 * steps // 4) * BATCH
    x = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    y = x @ rng.normal(size=(FEATURES, OUTPUTS)) + rng.normal(size=(rows, OUTPUTS))
    hook = nn.modules.module.register_module_forward_pre_hook(forward)
    threading.setprofile(calls.profile)  # of the threads that start from now on
    sys.setprofile(calls.profile)
    try:
        with place as client:
            daskdl.Trainer(
                functools.partial(nn.Linear, FEATURES, OUTPUTS),
                nn.MSELoss(),
                functools.partial(torch.optim.SGD, lr=0.05),
                master=daskdl.GradientSharing(**options),
                client=client,
                progress=False,
            ).fit(x, y.astype(np.float32), batch_size=BATCH)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        hook.remove()
    return calls


def steps_on_threads(steps: int, *, exchanging: bool) -> list[Counter[Function]]:
    """Calls of each step with an exchange, or without, of replicas on threads."""
    calls = counted(
        contextlib.nullcontext(False),
        steps,
        PAUSE_S if exchanging else 0.0,
        exchange_every=1 if exchanging else "auto",
        replicas_per_worker=REPLICAS,
    )
    return [
        step
        for thread in calls.threads
        for step in thread.steps
        if (PUBLISH in step) == exchanging
    ]


def list_functions(steps: Sequence[Counter[Function]]) -> None:
    """Print the median calls per step of each function, if there are any."""
    for function in dict.fromkeys(function for step in steps for function in step):
        calls = median(step[function] for step in steps)
        if calls:
            print(f"{calls:>12g}  {'.'.join(function)}")


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("path", __doc__)
    parser.add_argument(
        "--steps", type=int, default=200, help="counted, per replica (%(default)s)"
    )
    parser.add_argument(
        "--routing",
        default="plain",
        choices=["plain", "mesh"],
        help="of updates (%(default)s)",
    )
    parser.add_argument(
        "--top", type=int, default=25, help="functions to list (%(default)s)"
    )
    parser.add_argument(
        "--threads", action="store_true", help="list all functions of steps on threads"
    )
    asked = parser.parse_args(arguments)

    on_threads = {
        exchanging: steps_on_threads(asked.steps, exchanging=exchanging)
        for exchanging in (True, False)
    }
    calls = counted(
        cluster(), asked.steps, PAUSE_S, exchange_every=1, routing=asked.routing
    )
    replicas = [thread for thread in calls.threads if thread.steps]
    if len(replicas) < REPLICAS:
        raise SystemExit(f"{REPLICAS - len(replicas)} replicas made no step")
    updates = sum(len(thread.steps) for thread in replicas)
    in_training: Counter[Function] = Counter()  # in the order of a step
    elsewhere: Counter[Function] = Counter()
    for thread in calls.threads:
        for counts in thread.steps:
            in_training.update(counts)
        if not thread.steps:
            elsewhere.update(thread.calls)
    total = in_training + elsewhere
    print(f"# torch {torch.__version__}, Python {platform.python_version()}, ", end="")
    print(f"routing {asked.routing}, {updates} updates")

    modules: dict[str, list[int]] = defaultdict(list)
    for (module, _), count in total.items():
        modules[module].append(count)
    for title, on_path in (("modules of an update", True), ("other modules", False)):
        chosen = {
            module: sum(counts) / updates
            for module, counts in modules.items()
            if (max(counts) / updates >= ON_PATH) == on_path
        }
        print(f"\n{title}: {len(chosen)}\n{'module':36}{'calls/update':>12}")
        for module, count in chosen.items():
            print(f"{module:36}{count:>12.2f}")

    print("\nreplica   steps  calls/step  modules/step")
    for number, thread in enumerate(replicas):
        per_step = median(step.total() for step in thread.steps)
        modules_per_step = median(
            len({module for module, _ in step}) for step in thread.steps
        )
        print(
            f"{number:<7}{len(thread.steps):>8}{per_step:>12.0f}{modules_per_step:>14.0f}"
        )

    print("\non threads       steps  calls/step")
    for exchanging, counts_of_steps in on_threads.items():
        per_step = median(step.total() for step in counts_of_steps)
        title = "exchange" if exchanging else "no exchange"
        print(f"{title:15}{len(counts_of_steps):>7}{per_step:>12.0f}")
        if asked.threads:
            list_functions(counts_of_steps)

    print(f"\n{'calls per update':>24}\n{'training':>12}{'elsewhere':>12}  function")
    print(f"{in_training.total() / updates:>12.2f}", end="")
    print(f"{elsewhere.total() / updates:>12.2f}  all")
    for function, _ in total.most_common(asked.top):
        print(f"{in_training[function] / updates:>12.2f}", end="")
        print(f"{elsewhere[function] / updates:>12.2f}  {'.'.join(function)}")
