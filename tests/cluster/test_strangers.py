"""Malformed requests to any handler are refused and counted, and do no harm."""

import dataclasses
import inspect
import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from distributed.comm import connect
from distributed.protocol import to_serialize
from torch import nn

from daskdl import ModelError, Predictor, SaveError
from daskdl.channel.protocol import NAME, OF_REPLICAS, PART, RECEIVE, LiveReport
from daskdl.config import VERSION
from daskdl.training.replica import failure_of
from tests.support.clusters import cluster_of
from tests.support.problems import kept, parameters_of, rows, trainer

X, Y = rows()
WITHIN_S = 60.0

HUGE = 2**64 - 1  # the largest that a message can carry
NUMBERS = (-1, HUGE, math.nan)
JUNK = (
    *NUMBERS,
    None,
    7,
    True,
    "x",
    "y" * 10**5,
    b"bytes",
    [None],
    [[None]],
    {"a": None},
    to_serialize(object()),
    to_serialize(np.zeros(3)),
)
# Of the right type, but unknown.
NOTHING_HERE = {
    "run": [7],
    "replica": [7],
    "phase": ["x"],
    "kind": ["x"],
    "version": ["x"],
    "client": ["x"],
    "failure type": ["x"],
    "call": ["x"],
    "timeout_s": [*NUMBERS],
}
# Values that are junk elsewhere, but legal in these fields.
LEGAL = {
    "payload": JUNK,
    "idle_payload": JUNK,
    "replica": [None],
    "acknowledgement": [None],
    "live": [None],
}
# Other answers than a refusal: an unknown run or replica; closing it is no error.
INSTEAD = {"run": ["unknown", "ok"], "replica": ["unknown"]}
UNKNOWN = ("colour", "self", "one", "fields", "handler", "return", "comm", "")


class Held(nn.CrossEntropyLoss):
    """A loss that waits in mid-training until all malformed requests were sent."""

    reached, released = threading.Event(), threading.Event()
    calls = 0

    def forward(self, outputs, labels):
        Held.calls += 1
        if Held.calls >= 20:
            Held.reached.set()
            assert Held.released.wait(WITHIN_S)
        return super().forward(outputs, labels)


@pytest.fixture(scope="module")
def open_client():
    """A client of two workers that are threads of this process, with open ports."""
    with cluster_of(2, processes=False, protocol="tcp://") as client:
        yield client


@pytest.fixture
def logged(caplog):
    """Log records, including those of Dask."""
    loggers = [logging.getLogger(name) for name in ("distributed", "tornado")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    yield caplog.records
    for logger in loggers:
        logger.removeHandler(caplog.handler)


def junk_for(name, value):
    """Yield malformed values for a field, or with malformed parts."""
    legal = [id(junk) for junk in LEGAL.get(name, ())]
    for junk in JUNK:
        same = type(junk) is type(value)
        of_number = isinstance(value, float) and isinstance(junk, int)
        counts = isinstance(value, int) and junk in NUMBERS and junk != value
        if (counts or not same) and not of_number and id(junk) not in legal:
            yield junk
    yield from NOTHING_HERE.get(name, ())
    if isinstance(value, dict):
        for key, inner in value.items():
            parts = junk_for(f"{name} {key}", inner)
            yield from ({**value, key: junk} for junk in parts)
            yield {k: v for k, v in value.items() if k != key}
        yield {**value, "colour": "red"}
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value[:2]):
            parts = junk_for("", inner)
            yield from ([*value[:i], junk, *value[i + 1 :]] for junk in parts)


def requests(required, optional):
    """Yield malformed versions of a request, with the name of the wrong field."""
    if required:
        yield "all", {}
    for name in required:
        yield name, {k: v for k, v in required.items() if k != name}
    for name in UNKNOWN:
        yield name, {**required, name: "red"}
    for name, value in {**required, **optional}.items():
        for junk in junk_for(name, value):
            yield name, {**required, name: junk}


def fields_of(operation, handler, values):
    """Return required and optional fields of a request."""
    taken = dict(inspect.signature(handler).parameters)
    optional = {n for n, p in taken.items() if p.default is not p.empty} - {"secret"}
    of_run = taken.pop("self", None)  # the run is looked up before
    if of_run or "run" in taken:
        taken |= dict.fromkeys(["run", "secret"])
    if of_run and operation in OF_REPLICAS:
        taken["token"] = None
    fields = {name: values[name] for name in taken}
    return (
        {name: value for name, value in fields.items() if name not in optional},
        {name: value for name, value in fields.items() if name in optional},
    )


def of_daskdl(server, prefix):
    """Return the names of daskdl's handlers with a prefix."""
    return [name for name in server.handlers if name.startswith(prefix)]


class Attack:
    """Sends malformed requests to every handler of daskdl on a cluster.

    Attributes:
        refused: How many requests were refused.
        unknown: How many were for a run, or a replica, that is not there.
    """

    def __init__(self, client):
        self.client = client
        self.cluster = client.cluster
        self.refused = self.unknown = 0

    async def on_runs(self):
        """Send them to all handlers of the plugins, for the open run."""
        plugin = self.cluster.scheduler.extensions[NAME]
        ((run, live),) = plugin.runs.items()
        home = live.state.members.replicas[0].worker
        worker_of = {w.address: w for w in self.cluster.workers.values()}
        values = {
            "run": run,
            "secret": live.state.spec.secret,
            "spec": dataclasses.asdict(live.state.spec),  # it is already open
            "client": self.client.id,
            "seen": 0,
            "timeout_s": 0.0,
            "reason": "because",
            "worker": home,
            "replica": 0,
            "token": live.state.members.replicas[0].token,
            "replicas": 1,
            "phase": "train",
            "epoch": 0,
            "part": 0,
            "key": "attack",
            "avoid": [1],
            "version": VERSION,
            "versions": {"daskdl": VERSION, "torch": "2.8.0", "error": ""},
            "step": 0,
            "origin": 0,
            "messages": [["update", 0, 1, 0, 4, b"junk", 0]],
            "progress": [0, 0, -1],
            "steps": 0,
            "needed_step": 0,
            "acknowledgement": {
                "generation": 0,
                "adopted_at": 0,
                "received": [[1, 0]],
            },
            "finished": [{"lease": 0, "examples": 0, "loss": 0.0}],
            "wait": False,
            "idle_payload": None,
            "work": None,
            "payload": None,
            "client_payload": b"",
            "kind": "meet",
            "failure": failure_of(RuntimeError("boom"), step=0),
            "retires": False,
            "leaves": False,
            "fetching": False,
            "live": [*LiveReport(at_s=1.0)],
            "rows": [],
            "forms": [["model", "|u1", [4]]],
            "parts": 1,
            "number": 0,
            "workers": [home],
            "routes": [[home]],
            "contained": [[1, 0]],
        }
        before = live.state.refused
        await self.on(self.cluster.scheduler, values)
        assert live.state.refused == before + self.refused
        self.unknown = 0  # workers count it, the scheduler does not

        values |= {
            "messages": [["progress", 0, 0, 0, 0, -1, 0]],
            "shares": [[0, [0]]],
            "cut": [[1, 0]],
            "reader": 1,
            "sequences": [1],
            "name": "attack",
        }
        await self.on(worker_of[home], values)

    async def on_predictors(self):
        """Send them to all replicas of predictors."""
        request = {"call": "x", "version": 2, "payload": None, "wait": True}
        for server in self.cluster.workers.values():
            for operation in of_daskdl(server, "daskdl-predictor-"):
                comm = await connect(server.address)
                for call in ("ask", "stage", "use", "ping", "close"):
                    wrong = requests(request | {"call": call}, {})
                    await self.send_all(comm, operation, wrong)
                await comm.close()

    async def on(self, server, values):
        comm = await connect(server.address)
        for operation in of_daskdl(server, "daskdl_"):
            wrong = requests(*fields_of(operation, server.handlers[operation], values))
            await self.send_all(comm, operation, wrong)
        await comm.close()

    async def send_all(self, comm, operation, wrong):
        for name, fields in wrong:
            await self.send(comm, name, {"op": operation, **fields})

    async def send(self, comm, wrong, message):
        await comm.write(message)
        answer = await comm.read()
        assert isinstance(answer, dict), f"{answer!r} to {message!s:.500}"
        # What is sent for several replicas of a worker is answered by each.
        statuses = [reply["status"] for reply in (answer, *answer.get("answers", ()))]
        self.refused += statuses.count("refused")
        if message["op"] not in (PART, RECEIVE):  # a part may be requested too early
            self.unknown += statuses.count("unknown")
        assert "refused" in statuses or statuses[0] in INSTEAD.get(wrong, ()), (
            f"{answer} to {message!s:.500}"
        )
        assert len(answer.get("reason", "")) < 1000


def fitted(client, loss):
    """A lockstep fit, whose result depends on every update and their order."""
    fitted = trainer(client, master=kept(max_staleness=0), loss=loss, seed=7)
    history = fitted.fit(X, Y, epochs=2, batch_size=16)
    return parameters_of(fitted.model_), history


def test_a_run_is_not_changed_by_malformed_requests(open_client, logged):
    undisturbed, history = fitted(open_client, nn.CrossEntropyLoss())
    assert sum(history.column("refused_messages")) == 0
    attack = Attack(open_client)

    def refused_by_workers():
        servers = open_client.cluster.workers.values()
        return sum(each.extensions[NAME].refused for each in servers)

    def attacked():
        try:
            assert Held.reached.wait(WITHIN_S)
            before = refused_by_workers()  # what came for one that had left, say
            open_client.sync(attack.on_runs)
            return refused_by_workers() - before
        finally:
            Held.released.set()

    with ThreadPoolExecutor(1) as threads:
        attacking = threads.submit(attacked)
        parameters, history = fitted(open_client, Held())
        elsewhere = attacking.result(WITHIN_S)

    for name, value in undisturbed.items():
        np.testing.assert_array_equal(value, parameters[name])
    counted = sum(history.column("refused_messages")) + elsewhere
    assert counted == attack.refused + attack.unknown
    assert attack.refused > 1000
    assert not [r for r in logged if r.levelno >= logging.ERROR or r.exc_info]


def test_a_predictor_is_not_changed_by_malformed_requests(open_client, logged):
    attack = Attack(open_client)

    with Predictor(nn.Linear(20, 4), client=open_client) as predictor:
        before = predictor(X[:3])
        open_client.sync(attack.on_predictors)
        after = predictor(X[:3])

    np.testing.assert_array_equal(before, after)
    assert attack.refused > 100
    assert not [r for r in logged if r.levelno >= logging.ERROR or r.exc_info]
    assert not [r for r in logged if "is lost" in r.getMessage()]


def test_a_refusal_by_a_replica_is_an_error_of_the_call(open_client, monkeypatch):
    async def refuse(**fields):
        return {"status": "refused", "reason": "ask: no such tree"}

    with Predictor(nn.Linear(20, 4), client=open_client) as predictor:
        with monkeypatch.context() as patch:
            for server in open_client.cluster.workers.values():
                for name in of_daskdl(server, "daskdl-predictor-"):
                    patch.setitem(server.handlers, name, refuse)
            with pytest.raises(ModelError, match="ask: no such tree"):
                predictor(X[:3])
        assert predictor(X[:3]).shape == (3, 4)


def test_error_messages_are_bounded():
    assert len(str(SaveError("weight" * 20_000))) <= 2000
