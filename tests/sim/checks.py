"""What must hold while a fit runs, however long things take, and when it has ended.

Beside the oracle, which knows what replicas publish, receive and lease.
"""

from daskdl import errors
from daskdl.channel.protocol import MESSAGE_BYTES
from daskdl.channel.scheduler import WATCHDOG_S
from daskdl.training.telemetry import reports_of
from tests.sim.world import Process, Violation

LOOK_S = 0.25  # between two looks at queues and waits
SOON_S = 0.5  # in which what is due at once has to happen
FRAME_BYTES = 512  # more than any frame of these models


class Inspector:
    """Looks regularly at the queues of all processes, and at who waits for how long."""

    def __init__(self, cluster):
        self._cluster = cluster
        self._process = Process(cluster.world, "inspector")
        self._told = {}  # replicas that wait though they were told to stop, since when
        self._look()

    def _look(self):
        self._cluster.world.after(LOOK_S, self._process, self._look)
        self._look_at_queues()
        self._look_for_silence()
        self._look_at_waits()

    def _look_for_silence(self):
        """A replica from which the scheduler has heard nothing for long is removed."""
        world, scheduler = self._cluster.world, self._cluster.scheduler
        if not scheduler.process.runs_since(SOON_S):
            return
        for live in scheduler.plugin.runs.values():
            state, members = live.state, live.state.members
            if state.stopped is not None or not members.started:
                continue
            self._cluster.oracle.checks["a silent replica is removed"] += 1
            bound = state.timeouts.silence + WATCHDOG_S + SOON_S
            for replica in members.present:
                silent_s = world.now - members.replicas[replica].heartbeat_at
                if silent_s > bound:
                    text = f"replica {replica} is silent for {silent_s:.2f} s"
                    world.errors.append(f"{text}, and still a member")

    def _look_at_waits(self):
        """A replica that is told to stop waits for nothing any more."""
        world, oracle = self._cluster.world, self._cluster.oracle
        former, self._told = self._told, {}
        for worker in self._cluster.workers.values():
            if not worker.process.runs_since(SOON_S):
                continue
            for (_, replica), end in worker.plugin.endpoints.items():
                if end.inbox.stopped is None:
                    continue
                oracle.checks["no wait after a stop"] += 1
                cause = oracle.waiting.get(replica)
                if cause is None:
                    continue
                since = self._told[replica] = former.get(replica, world.now)
                if world.now - since >= SOON_S:
                    text = (
                        f"replica {replica} waits for {cause} {world.now - since:.2f}"
                    )
                    world.errors.append(f"{text} s after it was told to stop")

    def _look_at_queues(self):
        cluster, setup = self._cluster, self._cluster.client.setup
        cluster.oracle.checks["looks at all queues"] += 1
        replicas = len(cluster.workers) * setup.replicas
        most = FRAME_BYTES + MESSAGE_BYTES
        # Memberships and progress are queued in any case, some for each replica, and
        # all that the replicas of a closing worker have not sent.
        closing = sum(worker.closing for worker in cluster.workers.values())
        leaving = closing * setup.replicas * (setup.outbox_bytes + 2 * most)
        control = 64 * replicas * MESSAGE_BYTES + leaving
        for live in cluster.scheduler.plugin.runs.values():
            for replica, box in live.state.outboxes.items():
                bound = live.state.spec.queue_bytes + control
                self._bound(f"relay to {replica}", box, bound)
        for worker in cluster.workers.values():
            if worker.process.alive:
                for (_, replica), end in worker.plugin.endpoints.items():
                    routing = end.routing
                    name = f"of replica {replica}"
                    bound = setup.outbox_bytes + 2 * most
                    box = routing.to_scheduler.outbox
                    self._bound(f"outbox {name}", box, bound)
                    kept = max(routing.own_kept.limit_bytes, setup.outbox_bytes)
                    self._bound(
                        f"own updates {name}", routing.own_kept, kept + 2 * most
                    )
                    others = setup.inbox_bytes + most
                    self._bound(f"others' updates {name}", routing.others_kept, others)
                    self._bound(f"sums {name}", end.sums, others)
                    pending = end.inbox.pending
                    self._bound(f"inbox {name}", pending, 2 * others)

    def _bound(self, name, queue, most):
        if queue.nbytes > most:
            self._cluster.world.errors.append(
                f"the {name} has {queue.nbytes} bytes, and may have {most}"
            )


def check_end(scenario, cluster, epochs):
    """What must hold when a fit of so many epochs has ended."""
    client, world = cluster.client, cluster.world
    if not client.process.alive:
        return
    if client.error is not None:
        kind, text = client.error
        known = isinstance(getattr(errors, kind, None), type)
        check(known, f"the fit ended with an unknown error, {kind}: {text}")
        unwritten = "a worker was lost while it wrote" in text and scenario.faults
        # Of two updates without a readable copy, each origin has only its own.
        apart = "updates are out of reach" in text and len(cluster.oracle.damaged) > 1
        may_fail = scenario.may_fail or unwritten or apart
        check(may_fail, f"the fit ended with {kind}: {text}")
        named = "daskdl.timeouts." in text or "no replica is left" in text
        check(named or kind != "WaitTimeoutError", f"what timed out? {text}")
        return
    check(client.model is not None, "the fit has no model")
    stopped = [
        any(
            report.totals.stop
            for report in reports_of(dict(event["payloads"]), event["departed"])
        )
        for event in client.reports
    ]
    ended = len(stopped) == epochs or stopped[-1:] == [True]
    check(ended, f"{len(stopped)} epochs were reported")
    check(not any(stopped[:-1]), "replicas trained on after the fit was stopped")
    world.note("client", f"has a model of {client.model.parameters.digest}")


def check_nothing_left(cluster):
    """Nothing of a fit is left in any process that runs."""
    alive = cluster.scheduler.process.alive
    left = [f"run {run}" for run in cluster.scheduler.plugin.runs] if alive else []
    servers = [cluster.scheduler, cluster.client, *cluster.workers.values()]
    for server in servers:
        if server.process.alive:
            left += [
                f"{task.get_coro().__qualname__} of {server.name}"
                for task in server.process.loop.pending
            ]
            left += [
                f"thread {actor.name} of {server.name}"
                for actor in server.process.actors
                if not actor.ended
            ]
    for worker in cluster.workers.values():
        if worker.process.alive:
            left += [f"end {key} of {worker.name}" for key in worker.plugin.endpoints]
    check(not left, f"left after the fit: {', '.join(left)}")


def check(holds, what):
    if not holds:
        raise Violation(what)
