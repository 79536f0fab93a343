"""What one update passes, from the batch to the parameters of another replica.

Question: how many modules, and how many calls of functions, does an update take?
Counted:  calls of functions of daskdl, by `sys.setprofile` in all threads, while two
          workers in this process train a linear model on different rows and exchange
          at each step. A step of a replica is the time from one forward pass in its
          thread to the next. Counting starts once each replica has made `SKIPPED`
          steps, and ends when one of them has made `--steps` more; the end of the
          epoch comes later. A call is the start of a function, method, property or
          lambda in whose globals `__name__` is daskdl or below it, so also of an
          `__init__` that `dataclass` made; a generator or coroutine counts when it
          first runs, and not when it is resumed. Not counted: bodies of modules and
          classes, comprehensions and generator expressions (Python 3.12 inlines
          some), what `namedtuple` made, and compiled code. Numbers per update are
          divided by the steps of both replicas together, since each step publishes
          one update and applies about one. A replica pauses at each forward pass, so
          that updates do not wait for each other and travel together. A module is on
          the path if one of its functions is called at least once in two updates;
          others (heartbeats, leases, telemetry, progress) are listed apart.
Run:      python -m benchmarks path --top 20 --count 'check$'
"""

import argparse
import functools
import inspect
import json
import opcode
import platform
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from types import CodeType, FrameType

import numpy as np
import torch
from distributed import Client, LocalCluster
from torch import nn

import daskdl

REPLICAS, BATCH, FEATURES, OUTPUTS = 2, 16, 64, 16
SKIPPED = 30  # steps of each replica before any is counted
PAUSE_S = 0.008  # as for an accelerator that is not there; else messages are batched
ON_PATH = 0.5  # calls per update of one function, if updates pass its module
# Checks of entries, and looks at how far the optimizer has moved the parameters.
PATTERNS = [r"\bcheck$|valid", r"\babsorb_|sync_from_parameters_"]
INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
START = bytes([opcode.opmap["RESUME"], 0])

Function = tuple[str, str]  # module, qualified name


@dataclass(eq=False)
class Thread:
    """What one thread has called while calls were counted."""

    ident: int
    forwards: int = 0  # passes through the model, counted or not
    stepping: bool = False  # in a step all of which is counted
    steps: list[Counter[Function]] = field(default_factory=list)  # whole ones
    calls: Counter[Function] = field(default_factory=Counter)  # since the last of them
    callers: Counter[tuple[str, str]] = field(default_factory=Counter)  # and callees

    def begin_step(self) -> None:
        """End the step before, if all of it was counted."""
        if self.stepping:
            self.steps.append(self.calls)
        self.calls, self.stepping = Counter(), True


class Calls:
    """Counts calls of functions of daskdl in each thread, while `counting`."""

    def __init__(self, patterns: list[str]) -> None:
        self.counting = False
        self.threads: list[Thread] = []
        self._asked = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        self._own = threading.local()
        # By id: two functions of the same code in different modules are equal.
        self._known: dict[int, tuple[CodeType, Function | None, bool]] = {}

    def thread(self) -> Thread:
        """The one that calls this."""
        if not hasattr(self._own, "thread"):
            self._own.thread = Thread(threading.get_ident())
            self.threads.append(self._own.thread)
        return self._own.thread

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Take an event of `sys.setprofile`."""
        if event != "call" or not self.counting:
            return
        _, function, asked = self._look_up(frame)
        if function is None or _goes_on(frame):
            return
        self.thread().calls[function] += 1
        if asked:
            self.thread().callers[".".join(function), self._caller(frame)] += 1

    def _look_up(self, frame: FrameType) -> tuple[CodeType, Function | None, bool]:
        """The function of daskdl that runs, if any, and if its callers are counted."""
        code = frame.f_code
        if id(code) not in self._known:
            module, name = frame.f_globals.get("__name__", ""), code.co_qualname
            own = f"{module}.".startswith("daskdl.") and code.co_name not in INLINED
            if own and code.co_flags & inspect.CO_NEWLOCALS:  # no module, no class
                asked = self._asked.search(f"{module}.{name}") is not None
                self._known[id(code)] = code, (module, name), asked
            else:
                self._known[id(code)] = code, None, False
        return self._known[id(code)]

    def _caller(self, frame: FrameType) -> str:
        outer = frame.f_back
        while outer is not None and self._look_up(outer)[1] is None:
            outer = outer.f_back
        return ".".join(self._look_up(outer)[1]) if outer else "no function of daskdl"


def _goes_on(frame: FrameType) -> bool:
    """Whether this is a generator or coroutine that is resumed: a "call", too."""
    code, at = frame.f_code, frame.f_lasti
    return bool(code.co_flags & RESUMABLE) and code.co_code[at : at + 2] != START


def counted(routing: str, steps: int, patterns: list[str]) -> tuple[Calls, set[int]]:
    """Calls of a fit, and the event loops' threads."""
    calls, lock, ready = Calls(patterns), threading.Lock(), set()

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
            time.sleep(PAUSE_S)

    rng = np.random.default_rng(0)
    rows = REPLICAS * (2 * SKIPPED + 5 * steps // 4) * BATCH
    x = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    y = x @ rng.normal(size=(FEATURES, OUTPUTS)) + rng.normal(size=(rows, OUTPUTS))
    hook = nn.modules.module.register_module_forward_pre_hook(forward)
    threading.setprofile(calls.profile)  # of the threads that start from now on
    sys.setprofile(calls.profile)
    try:
        with (
            LocalCluster(
                n_workers=REPLICAS,
                processes=False,
                threads_per_worker=1,
                dashboard_address=None,
            ) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            loops = {client.run_on_scheduler(threading.get_ident)}
            loops.update(client.run(threading.get_ident).values())
            daskdl.Trainer(
                functools.partial(nn.Linear, FEATURES, OUTPUTS),
                nn.MSELoss(),
                functools.partial(torch.optim.SGD, lr=0.05),
                master=daskdl.GradientSharing(routing=routing),
                client=client,
                progress=False,
            ).fit(x, y.astype(np.float32), batch_size=BATCH)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        hook.remove()
    return calls, loops


def kind_of(thread: Thread, loops: set[int]) -> str:
    if thread.steps:
        return "training"
    if thread.ident in loops:
        return "event loop"
    return "client" if thread.ident == threading.main_thread().ident else "other"


def per_update(calls: Calls, loops: set[int]) -> dict[Function, Counter[str]]:
    """Calls per update of each function, by kind of thread, in the order of a step."""
    updates = sum(len(thread.steps) for thread in calls.threads)
    table: dict[Function, Counter[str]] = defaultdict(Counter)
    for thread in sorted(calls.threads, key=lambda t: -len(t.steps)):
        for counts in thread.steps or [thread.calls]:
            for function, count in counts.items():
                table[function][kind_of(thread, loops)] += count / updates
    return table


def modules_of(table: dict[Function, Counter[str]]) -> list[dict]:
    """In the order in which a step calls them; then those of the other threads."""
    functions: dict[str, list[Counter[str]]] = defaultdict(list)
    for (module, _), row in table.items():
        functions[module].append(row)
    return [
        {
            "module": name,
            "calls_per_update": sum(row.total() for row in rows),
            "on_path": max(row.total() for row in rows) >= ON_PATH,
            "threads": sorted({kind for row in rows for kind in row}, reverse=True),
        }
        for name, rows in functions.items()
    ]


def print_modules(title: str, modules: list[dict]) -> None:
    print(f"\n{title}: {len(modules)}\n{'module':36}{'calls/update':>12}  threads")
    for module in modules:
        name, calls, _, threads = module.values()
        print(f"{name:36}{calls:>12.2f}  {', '.join(threads)}")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="counted, per replica")
    parser.add_argument("--routing", default="plain", help="see GradientSharing")
    parser.add_argument("--top", type=int, default=25, help="functions to list")
    parser.add_argument(
        "--count",
        action="append",
        metavar="PATTERN",
        help="list callers of functions like this, a regular expression of "
        f"module.name; can be repeated; default: {' and '.join(PATTERNS)}",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the numbers here")
    asked = parser.parse_args(arguments)
    patterns = asked.count or PATTERNS

    calls, loops = counted(asked.routing, asked.steps, patterns)
    table = per_update(calls, loops)
    modules = modules_of(table)
    replicas = [
        {
            "steps": len(thread.steps),
            "calls_per_step": median(step.total() for step in thread.steps),
            "modules_per_step": median(len({m for m, _ in s}) for s in thread.steps),
            "fewest_calls": min(step.total() for step in thread.steps),
            "most_calls": max(step.total() for step in thread.steps),
        }
        for thread in calls.threads
        if thread.steps
    ]
    if len(replicas) < REPLICAS:
        raise SystemExit(
            f"{REPLICAS - len(replicas)} replicas made no step in that time"
        )
    updates = sum(replica["steps"] for replica in replicas)

    print(f"# torch {torch.__version__}, Python {platform.python_version()}, ", end="")
    print(f"routing {asked.routing}, {updates} updates")
    path = [module for module in modules if module["on_path"]]
    print_modules("modules that an update passes", path)
    print_modules("other modules", [m for m in modules if not m["on_path"]])

    print(f"\nreplica  {'  '.join(replicas[0])}")
    for number, row in enumerate(replicas):
        cells = (f"{value:>{len(name)}.0f}" for name, value in row.items())
        print(f"{number:<7}  {'  '.join(cells)}")

    lines = [(".".join(f), row["training"], row.total()) for f, row in table.items()]
    lines.sort(key=lambda line: -line[2])
    everything = ("all", sum(own for _, own, _ in lines), sum(n for *_, n in lines))
    print(f"\n{'calls per update':>24}\n{'training':>12}{'elsewhere':>12}  function")
    for name, own, both in [everything, *lines[: asked.top]]:
        print(f"{own:>12.2f}{both - own:>12.2f}  {name}")

    found: dict[str, Counter[tuple[str, str, str]]] = {p: Counter() for p in patterns}
    for pattern, rows in found.items():
        for thread in calls.threads:
            for (name, caller), count in thread.callers.items():
                if re.search(pattern, name):
                    rows[name, kind_of(thread, loops), caller] += count / updates
        print(f"\n--count {pattern!r}: {rows.total():.2f} calls per update")
        for (name, kind, caller), count in rows.most_common():
            print(f"{count:>12.2f}  {name}\n{'':14}{kind}, called by {caller}")

    if asked.json:
        written = {
            "routing": asked.routing,
            "updates": updates,
            "replicas": replicas,
            "modules": modules,
            "functions": {".".join(f): row for f, row in table.items()},
            "count": {p: [(*k, n) for k, n in r.items()] for p, r in found.items()},
        }
        with open(asked.json, "w") as file:
            json.dump(written, file, indent=2)
