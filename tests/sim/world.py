"""A world with a time of its own, in which one thing happens after another.

Each process has an event loop and threads. A thread holds the baton until it waits on a
condition of the channel or sleeps; meanwhile nothing else runs and no time passes.
Everything that is left to chance is drawn from one seed, so a run depends on it alone.
"""

import asyncio
import concurrent.futures
import contextlib
import hashlib
import heapq
import inspect
import itertools
import random
import sys
import threading
import warnings
from collections import defaultdict, deque

from typing_extensions import override

from daskdl.channel.transport import Clock

LAST = 12  # events of each actor that a failure shows
WAKE_S = 2e-4  # longest time until a thread that is notified runs
PREEMPTED_S = 1e-3  # longest time that a thread is kept from running
MAX_WAIT_S = 1000.0  # virtual; no wait of the channel may take longer


class Violation(AssertionError):
    """Something that must not happen has happened."""


class Killed(BaseException):
    """Unwinds a thread whose process was killed."""


class Trace:
    """What happens, as lines of text; keeps the last of each actor.

    Args:
        whole: Keep all lines in `lines`.
    """

    def __init__(self, whole=False):
        self.lines = [] if whole else None
        self.count = 0
        self._hash = hashlib.sha256()
        self._last = defaultdict(lambda: deque(maxlen=LAST))

    def note(self, now, who, what):
        line = f"{now:12.6f} {who}: {what}"
        self.count += 1
        self._hash.update(line.encode() + b"\n")
        self._last[who].append(line)
        if self.lines is not None:
            self.lines.append(line)

    @property
    def digest(self):
        return self._hash.hexdigest()

    def last(self):
        """The last lines of each actor."""
        return "\n\n".join("\n".join(lines) for _, lines in sorted(self._last.items()))


@contextlib.contextmanager
def no_warnings():
    """A task that is cancelled before it begins leaves a coroutine unawaited."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")
        yield


class World:
    """Virtual time and the events in it.

    Args:
        seed: Of everything that is left to chance.
        preempted: Probability that a thread is kept from running when it takes a lock.
        trace: Gets what happens.

    Attributes:
        now: Virtual time, seconds.
        random: The only source of chance.
        current: Thread that holds the baton; None: an event loop runs.
        errors: Errors that nobody has caught.
    """

    def __init__(self, seed, preempted=0.0, trace=None):
        self.now = 0.0
        self.random = random.Random(seed)
        self.current = None
        self.errors = []
        self.trace = trace or Trace()
        self.processes = []
        self.events = 0
        self.back = threading.Lock()  # released by the thread that gives the baton back
        self.back.acquire()
        self._preempted = preempted
        self._heap = []
        self._count = itertools.count()

    def at(self, when, process, action):
        """Call an action at a time, in a process, unless it is dead by then."""
        heapq.heappush(self._heap, (when, next(self._count), process, action))

    def after(self, delay_s, process, action):
        self.at(self.now + delay_s, process, action)

    def note(self, who, what):
        self.trace.note(self.now, who, what)

    def run(self, over, limit_s):
        """Let things happen until it is over."""
        with no_warnings():
            self._run(over, limit_s)

    def _run(self, over, limit_s):
        while not over():
            if not self._heap:
                raise Violation("nothing happens any more")
            when, _, process, action = heapq.heappop(self._heap)
            if when > limit_s:
                raise Violation(f"it is not over after {limit_s} s")
            self.now = max(self.now, when)
            if process.alive and process.frozen:
                process.missed.append(action)
            elif process.alive:
                self.events += 1
                process.run(action)
            if self.errors:
                raise Violation("; ".join(self.errors))

    def violated(self, what):
        """End the world with an error, even if the caller catches it."""
        self.errors.append(what)
        raise Violation(what)

    def preempt(self):
        """Perhaps let others run before the current thread takes a lock."""
        chance = self._preempted
        if self.current is not None and chance and self.random.random() < chance:
            self.current.sleep(self.random.uniform(0, PREEMPTED_S))

    def close(self):
        """End all that is left, without a trace."""
        with no_warnings():
            for process in self.processes:
                process.kill()
            for process in self.processes:
                process.run(process.loop.close)
        self._heap.clear()


class Process:
    """A process of the world.

    Attributes:
        alive: Whether it was not killed.
        frozen: Whether nothing in it runs, as after SIGSTOP.
        thawed_at: When it was frozen last, and then ran again.
        missed: What became due while it was frozen.
    """

    def __init__(self, world, name):
        self.world = world
        self.name = name
        self.alive = True
        self.frozen = False
        self.thawed_at = 0.0
        self.missed = []
        self.actors = []
        self.loop = ProcessLoop(self)
        self.clock = WorldClock(world)
        world.processes.append(self)

    def run(self, action):
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self.loop)
        try:
            action()
        finally:
            asyncio._set_running_loop(outer)

    def start(self, name, target, *arguments):
        """Run a function in a thread of this process; return its future."""
        actor = Actor(self, name, lambda: target(*arguments))
        self.actors = [actor for actor in self.actors if not actor.ended]
        self.actors.append(actor)
        self.world.after(0.0, self, actor.resume)
        return actor.result

    def kill(self):
        """End it at once, as SIGKILL does."""
        self.alive = False
        for actor in self.actors:
            actor.kill()

    def runs_since(self, duration_s):
        """Whether it runs, and was not frozen in the last seconds."""
        thawed_s = self.world.now - self.thawed_at
        return self.alive and not self.frozen and thawed_s >= duration_s

    def freeze(self):
        self.frozen = True

    def thaw(self):
        self.frozen, self.thawed_at = False, self.world.now
        missed, self.missed = self.missed, []
        for action in missed:
            self.world.after(0.0, self, action)


class Actor:
    """A thread of a process, which runs only while it holds the baton."""

    def __init__(self, process, name, target):
        self.process = process
        self.name = name
        self.result = concurrent.futures.Future()
        self.result.set_running_or_notify_cancel()  # from now on it is not cancelled
        self.ended = self.killed = False
        self._target = target
        self._turn = 0  # number of the current wait
        self._go = threading.Lock()
        self._go.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    # ---- the world's thread

    def resume(self):
        """Give it the baton until it waits or ends."""
        if self.ended:
            return
        world = self.process.world
        world.current = self
        if self._started:
            self._go.release()
        else:
            self._started = True
            self._thread.start()
        world.back.acquire()
        world.current = None

    def wake(self, turn):
        """Resume it if it is still in the same wait."""
        if turn == self._turn:
            self.resume()

    def kill(self):
        self.killed = True
        if self._started:
            self.resume()
        self.ended = True

    # ---- its own thread

    def _run(self):
        try:
            result = self._target()
        except Killed:
            pass
        except BaseException as error:
            self.result.set_exception(error)
        else:
            self.result.set_result(result)
        self.ended = True
        self._target = None
        self.process.world.back.release()

    def pause(self, timeout_s=None):
        """Give the baton back until it is woken, or for a time."""
        if self.killed:
            raise Killed
        self._turn += 1
        if timeout_s is not None:
            turn, process = self._turn, self.process
            process.world.after(timeout_s, process, lambda: self.wake(turn))
        self.process.world.back.release()
        self._go.acquire()
        self._turn += 1  # later wake-ups are for a wait that is over
        if self.killed:
            raise Killed

    def sleep(self, duration_s):
        self.pause(duration_s)

    def waker(self):
        """What resumes it from its current wait."""
        turn = self._turn
        return lambda: self.wake(turn)


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of a process, on the time of its world."""

    def __init__(self, process):
        self._process = process
        self._world = process.world
        # Kept, so that none is collected at some time.
        self._tasks, self._given = [], []

    @override
    def time(self):
        return self._world.now

    @override
    def get_debug(self):
        return False

    @override
    def is_running(self):
        return True

    @override
    def is_closed(self):
        return False

    @override
    def call_soon(self, callback, *arguments, context=None):
        handle = asyncio.Handle(callback, arguments, self, context)
        self._world.after(0.0, self._process, lambda: self._call(handle))
        return handle

    @override
    def call_soon_threadsafe(self, callback, *arguments, context=None):
        names = getattr(getattr(callback, "__code__", None), "co_freevars", ())
        if "coro" in names:  # of `run_coroutine_threadsafe`
            coroutine = callback.__closure__[names.index("coro")].cell_contents
            self._given.append(coroutine)
        return self.call_soon(callback, *arguments, context=context)

    @override
    def call_later(self, delay, callback, *arguments, context=None):
        return self.call_at(self.time() + delay, callback, *arguments, context=context)

    @override
    def call_at(self, when, callback, *arguments, context=None):
        handle = asyncio.TimerHandle(when, callback, arguments, self, context)
        self._world.at(when, self._process, lambda: self._call(handle))
        return handle

    @staticmethod
    def _call(handle):
        if not handle.cancelled():
            handle._run()

    def _timer_handle_cancelled(self, handle):
        pass

    @override
    def create_future(self):
        return asyncio.Future(loop=self)

    @override
    def create_task(self, work, *, name=None, context=None):
        task = asyncio.Task(work, loop=self, name=name, context=context)
        if len(self._tasks) > 1000:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._given = [
                coroutine for coroutine in self._given if coroutine.cr_frame is not None
            ]
        self._tasks.append(task)
        return task

    @property
    def pending(self):
        """Tasks that are not done."""
        return [task for task in self._tasks if not task.done()]

    @override
    def run_in_executor(self, executor, function, *arguments):
        result = self._process.start("thread", function, *arguments)
        return asyncio.wrap_future(result, loop=self)

    @override
    def call_exception_handler(self, context):
        if self._process.alive:
            error = context.get("exception")
            what = f"{context['message']}: {error!r}"
            self._world.errors.append(f"{self._process.name}: {what}")

    @override
    def close(self):
        """Drop what has not ended, in its order."""
        for task in self.pending:
            task._log_destroy_pending = False
        for work in (*(task.get_coro() for task in self.pending), *self._given):
            drop(work)
        self._tasks.clear()
        self._given.clear()


def drop(work):
    """Close a coroutine, and those that it has not begun to await."""
    if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
        for inner in work.cr_frame.f_locals.values():
            if inspect.iscoroutine(inner):
                drop(inner)
    with contextlib.suppress(RuntimeError):  # it awaits more
        work.close()


class WorldClock(Clock):
    """The clock of a process."""

    def __init__(self, world):
        self._world = world

    @override
    def now(self):
        return self._world.now

    @override
    def condition(self):
        return WorldCondition(self._world)


class WorldCondition:
    """A condition whose waits hand over the baton; as `threading.Condition`."""

    def __init__(self, world):
        self._world = world
        self._depth = 0
        self._waiting = []

    def __enter__(self):
        if not self._depth:
            self._world.preempt()
        self._depth += 1
        return True

    def __exit__(self, *exc_info):
        self._depth -= 1

    def notify_all(self):
        waiting, self._waiting = self._waiting, []
        for process, wake in waiting:
            delay_s = self._world.random.uniform(0, WAKE_S)
            self._world.after(delay_s, process, wake)

    def wait(self, timeout_s=None):
        actor = self._world.current
        assert actor is not None, "an event loop must not block"
        depth, self._depth = self._depth, 0
        turn = actor._turn + 1  # of the pause below
        self._waiting.append((actor.process, lambda: actor.wake(turn)))
        try:
            actor.pause(timeout_s)
        finally:
            self._depth = depth

    def wait_for(self, ready, timeout_s=None):
        world = self._world
        actor, began_at = world.current, world.now
        result = ready()
        if result:
            return result
        what = waited_for()
        end = began_at + (MAX_WAIT_S if timeout_s is None else timeout_s)
        while not result and world.now < end:
            self.wait(end - world.now)
            result = ready()
        if timeout_s is None and not result:
            world.violated(f"{actor.name} waits for {what} since {began_at:.3f} s")
        if world.now - began_at >= 0.1:
            waited_s = world.now - began_at
            world.note(actor.name, f"waited {waited_s:.3f} s for {what}")
        return result


def waited_for():
    """The cause of the wait that calls this, from the channel's own stack."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "_timed":
            return str(frame.f_locals["cause"])
        frame = frame.f_back
    return inspect.currentframe().f_back.f_back.f_code.co_name
