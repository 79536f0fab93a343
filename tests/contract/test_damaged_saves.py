"""Whatever is done to the files of saves: an error of daskdl, or no harm.

Nothing in them is executed, and nothing is written. A wrong field of a checkpoint whose
checksums are right is a `SaveError` that names the file and the field.
"""

import copy
import gc
import hashlib
import json
import os
import pickle
import random
import sys
import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from daskdl import (
    Checkpoint,
    DaskDLError,
    EarlyStopping,
    GradientSharing,
    OptionError,
    ParameterAveraging,
    SaveError,
    Trainer,
)
from daskdl.saving.checkpoints import Part, Series, complete_at
from daskdl.training.checkpointing import resume_plan, start_state
from tests.support.manifests import at, paths_in, sealed
from tests.support.saves import layers

FLIPS, CUTS, CHANGES = 25, 8, 120  # of each file; of the JSON
X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
MINE = b"the user's own"
FOLDERS = {"trainer": "save", "checkpoint": "checkpoint-000001"}
INDEXES = {
    "trainer": ["trainer.json"],
    "checkpoint": ["common.json", "replica-0.json", "replica-1.json"],
}
TENSORS = {
    "trainer": ["model-", "optimizer-", "extra-"],
    "checkpoint": ["common-", "replica-0-", "replica-1-"],
}
KINDS = pytest.mark.parametrize("kind", FOLDERS)
EACH_TENSORS = pytest.mark.parametrize(
    ("kind", "start"), [(kind, name) for kind in FOLDERS for name in TENSORS[kind]]
)
EACH_FILE = pytest.mark.parametrize(
    ("kind", "start"),
    [(k, name) for k in FOLDERS for name in (*INDEXES[k], *TENSORS[k])],
)
WRONG = [None, True, -1, 2**70, 1.5, 1e308, "x", "../../x", [], {}, [[]], {"x": []}]
MASTERS = {
    "sharing": GradientSharing(max_staleness=0, replicas_per_worker=2),
    "averaging": ParameterAveraging(
        replicas_per_worker=2,
        outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9),
    ),
    "alone": GradientSharing(replicas_per_worker=1),
}


class Watch:
    """Records what this thread does that loading never does; there is one hook."""

    ACTIONS = (
        "os.exec",
        "os.fork",
        "os.mkdir",
        "os.posix_spawn",
        "os.remove",
        "os.rename",
        "os.system",
        "pickle.find_class",
        "socket.connect",
        "subprocess.Popen",
    )

    def __init__(self):
        self.watching = None
        self.seen = []
        sys.addaudithook(self.note)

    def note(self, event, arguments):
        if self.watching != threading.get_ident():
            return
        writes = event == "open" and set(str(arguments[1])) & set("wax+")
        if event in self.ACTIONS or writes:
            self.seen.append((event, arguments))


WATCH = Watch()


def trainer(kind="sharing", *callbacks):
    return Trainer(
        layers,
        nn.CrossEntropyLoss(torch.ones(2)),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        master=MASTERS[kind],
        client=False,
        progress=False,
        telemetry_every=1,
        scheduler=lambda o: lr_scheduler.StepLR(o, 1),
        callbacks=callbacks,
    )


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """Files by name: of a trainer, and of a checkpoint in the middle of an epoch."""
    url, folder = (tmp_path_factory.mktemp(name) for name in ("series", "save"))
    checkpoint = Checkpoint(url, "2 steps", keep_last=None)
    fitted = trainer("sharing", EarlyStopping("loss", patience=9), checkpoint)
    fitted.fit(X, Y, epochs=2, batch_size=4)
    fitted.save(folder)
    series = Series.at(url)
    [last] = [
        checkpoint
        for checkpoint in map(complete_at, map(series.folder, series.numbers()))
        if checkpoint.header["epoch"] == 1
        and checkpoint.header["sync_point"] is not None
    ]
    return {
        "trainer": {path.name: path.read_bytes() for path in folder.iterdir()},
        "checkpoint": {name: last.store.read(name) for name in last.store.names()},
    }


class Place:
    """A folder for files of one kind, and a file of the user beside it."""

    def __init__(self, kind, files, around):
        self.kind, self.files, self.around = kind, files, around
        self.folder = around / FOLDERS[kind]
        self.folder.mkdir(parents=True)
        (around / "x").write_bytes(MINE)

    def named(self, start):
        (name,) = (name for name in self.files if name.startswith(start))
        return name

    def index(self, name):
        return json.loads(self.files[name])

    def put(self, changed):
        for path in self.folder.iterdir():
            path.unlink()
        for name, content in {**self.files, **changed}.items():
            if content is not None:
                (self.folder / name).write_bytes(content)

    def outcome(self, changed):
        """What reading comes to with other files, or an error; others are raised."""
        self.put(changed)
        before = sorted((p.name, p.read_bytes()) for p in self.folder.iterdir())
        WATCH.seen.clear()
        gc.disable()  # objects of earlier tests would remove their files meanwhile
        WATCH.watching = threading.get_ident()
        try:
            if self.kind == "trainer":
                return Trainer.load(
                    self.folder, client=False, trusted=["tests.support"]
                )
            plan = resume_plan(self.around, [])
            return [start_state(plan, replica, 2) for replica in range(2)]
        except DaskDLError as error:
            return error
        finally:
            WATCH.watching = None
            gc.enable()
            assert WATCH.seen == []
            after = sorted((p.name, p.read_bytes()) for p in self.folder.iterdir())
            assert after == before


@pytest.fixture
def kind():
    return "trainer"


@pytest.fixture
def place(kind, saves, tmp_path):
    fitted = Place(kind, saves[kind], tmp_path / "around")
    yield fitted
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert files - {*fitted.folder.iterdir()} == {fitted.around / "x"}
    assert (fitted.around / "x").read_bytes() == MINE


def one_wrong(place, generator):
    """An index with one value replaced, or one field removed."""
    name = generator.choice(INDEXES[place.kind])
    index = place.index(name)
    paths = [path for path in paths_in(index) if path and path[0] != "sha256"]
    *outer, last = generator.choice(paths)
    inner = at(index, outer)
    inner[last] = copy.deepcopy(generator.choice(WRONG))
    if isinstance(last, str) and generator.random() < 0.4:
        del inner[last]
    return {name: sealed(index)}


@KINDS
def test_undamaged_files_are_read(place):
    assert not isinstance(place.outcome({}), DaskDLError)


@EACH_FILE
def test_any_flipped_bit_is_found(place, start):
    name, generator = place.named(start), random.Random(start)
    for _ in range(FLIPS):
        content = bytearray(place.files[name])
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)

        if not isinstance(place.outcome({name: bytes(content)}), SaveError):
            # 1e-05 and 1E-05 are the same number.
            assert json.loads(content) == place.index(name)


@EACH_FILE
def test_any_truncated_or_missing_file_is_found(place, start):
    name, generator = place.named(start), random.Random(start)
    whole = place.files[name]
    cuts = [whole[: generator.randrange(len(whole))] for _ in range(CUTS)]
    for content in (None, *cuts):
        assert isinstance(place.outcome({name: content}), SaveError)


@KINDS
def test_wrong_values_are_errors_or_harmless(place):
    generator = random.Random("values")

    outcomes = [place.outcome(one_wrong(place, generator)) for _ in range(CHANGES)]

    # Others are, say, the loss in a row of the history.
    assert sum(isinstance(outcome, DaskDLError) for outcome in outcomes) > CHANGES / 4


class Bomb:
    """Pickled, it is a call that leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("pickled", ["pickle", "torch"])
@EACH_TENSORS
def test_a_pickle_instead_of_tensors_is_refused_and_not_executed(
    place, tmp_path, start, pickled
):
    marker, aside = tmp_path / "exploded", tmp_path / "bomb"
    with aside.open("wb") as file:
        (pickle.dump if pickled == "pickle" else torch.save)(Bomb(marker), file)
    bomb = aside.read_bytes()
    aside.unlink()
    old, digest = place.named(start), hashlib.sha256(bomb).hexdigest()
    new = f"{start}{digest[:16]}.safetensors"
    [name] = [n for n in INDEXES[place.kind] if old in place.files[n].decode()]
    index = place.index(name)
    [entry] = [entry for entry in index["files"] if entry["name"] == old]
    entry |= {"name": new, "nbytes": len(bomb), "sha256": digest}

    outcome = place.outcome({old: None, new: bomb, name: sealed(index)})

    assert isinstance(outcome, SaveError)
    assert "not a safetensors file" in str(outcome)
    assert not marker.exists()


def partial(name):
    of, keywords = {"import": name}, {"dict": [["shell", True]]}
    return {"partial": {"of": of, "arguments": ["touch"], "keywords": keywords}}


@pytest.mark.parametrize("argument", ["model", "seed"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"import": "os:abort"}, SaveError),
        ({"import": "pty:spawn"}, SaveError),
        ({"import": "daskdl.training.replica:os.abort"}, OptionError),
        ({"import": "_pytest.config:main"}, OptionError),
        ({"import": "save.payload:Net"}, OptionError),
        (partial("subprocess:call"), SaveError),
        (partial("torch.serialization:load"), OptionError),
        (partial("torch.hub:load"), OptionError),
        (partial("torch.fx.graph_module:reduce_graph_module"), OptionError),
        ({"torch": "hub.load"}, SaveError),
        ({"torch": "nn.functional.torch"}, SaveError),
        ({"object": {"class": "daskdl.trainer:Trainer", "fields": {}}}, OptionError),
        ({"object": {"class": "pathlib:Path", "fields": {}}}, SaveError),
        ({"loss": {"class": "eval", "arguments": {"dict": []}}}, SaveError),
    ],
    ids=lambda value: str(value)[:60],
)
def test_code_named_in_a_file_is_not_imported_or_called(
    place, argument, value, error, monkeypatch
):
    marker, index = place.around / "ran", place.index("trainer.json")
    index["content"]["arguments"][argument] = {"value": value}
    payload = (
        f"import os\nos.mkdir({str(marker)!r})\nfrom torch.nn import Linear as Net"
    )
    monkeypatch.syspath_prepend(place.around)  # where "save" is a package

    outcome = place.outcome(
        {"payload.py": payload.encode(), "trainer.json": sealed(index)}
    )

    assert type(outcome) is error
    assert error is SaveError or "trusted=[" in str(outcome)
    assert not marker.exists()


def test_the_watch_records_actions():
    WATCH.watching = threading.get_ident()
    pickle.loads(pickle.dumps(OrderedDict()))
    WATCH.watching = None

    assert ("pickle.find_class", ("collections", "OrderedDict")) in WATCH.seen
    WATCH.seen.clear()


# ---- fields of checkpoints whose checksums are right


# torch makes them anew, or they are not looked at without an EarlyStopping.
UNUSED = {"initial_lr", "monitor", "best_epoch"}


@pytest.fixture(scope="module", params=MASTERS)
def kept(request, tmp_path_factory):
    """A kind of training, and the newest checkpoint of a fit of one epoch."""
    url = tmp_path_factory.mktemp("checkpoints")
    trainer(request.param, Checkpoint(url)).fit(X, Y, epochs=1, batch_size=4)
    return request.param, Series.at(url).newest().store


def removed(holder, name):
    del holder[name]


def retyped(holder, name):
    holder[name] = "x" if not isinstance(holder[name], str) else [7]


def resized(holder, name):
    holder[name] = torch.cat([holder[name].reshape(-1)] * 2)


def damages(state):
    """Each wrong thing that is done to a state: how, and where."""
    for path in paths_in(state):
        *outer, name = path or [None]
        if not path or not isinstance(at(state, outer), dict) or name in UNUSED:
            continue
        if outer[-1:] == ["state"] and str(name).startswith("_"):
            continue
        yield retyped, path
        # torch puts its defaults in place of an option that is missing; a parameter
        # without a gradient has no state, and a pattern may be new.
        optional = type(name) is int or name == "*"
        if "param_groups" not in path and not optional:
            yield removed, path
        if isinstance(at(state, path), torch.Tensor) and at(state, path).dim():
            yield resized, path


def outcome(kind, url):
    try:
        trainer(kind).fit(X, Y, epochs=2, batch_size=4, resume=url)
    except DaskDLError as error:
        return error
    return None


def rewritten(store, folder, part, change):
    """Copy a checkpoint, with the header and state of a part changed."""
    for name in store.names():
        (folder / name).write_bytes(store.read(name))
    target = Part(Series.at(folder).store, part)
    (stamp, header), (_, state) = target.header(), target.read()
    state = {name: value for name, value in state.items() if name not in header}
    change(header, state)
    target.write(target.copied(stamp, header, state))


@pytest.mark.parametrize("sample", [8, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", ["common", "replica-0"])
def test_a_wrong_field_of_the_state_is_named(kept, tmp_path, part, sample):
    kind, store = kept
    header, state = Part(store, part).header()[1], Part(store, part).read()[1]
    cases = list(damages({n: v for n, v in state.items() if n not in header}))
    if sample:
        cases = random.Random(f"{kind} {part}").sample(cases, sample)

    for how, path in cases:

        def change(_, state, how=how, path=path):
            how(at(state, path[:-1]), path[-1])

        rewritten(store, tmp_path, part, change)
        error = outcome(kind, tmp_path)
        assert isinstance(error, SaveError), (how, path, error)
        assert f"{part}.json" in str(error), (how, path)
        assert str(path[0]) in str(error), (how, path)


@pytest.fixture(scope="module")
def in_an_epoch(tmp_path_factory):
    """The first checkpoint of a fit, in the middle of its epoch."""
    url = tmp_path_factory.mktemp("middle")
    fitted = trainer("sharing", Checkpoint(url, every="2 steps", keep_last=None))
    fitted.fit(X, Y, epochs=1, batch_size=4)
    return "sharing", Series.at(url).folder(1)


def resumed_with(kept, folder, change):
    """What a fit makes of a checkpoint whose header was changed."""
    kind, store = kept
    rewritten(store, folder, "common", lambda header, _: change(header))
    return outcome(kind, folder)


FIELDS = ["epoch", "sync_point", "rows", "stopping", "epochs_before", "scaled_by"]
FIELDS += ["kind", "fingerprint", "count", "members"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("how", [removed, retyped])
def test_a_wrong_field_of_the_header_is_an_error(kept, tmp_path, field, how):
    outcome = resumed_with(kept, tmp_path, lambda header: how(header, field))

    assert isinstance(outcome, SaveError | OptionError), outcome


BEST = [-1, float("nan"), -1, float("nan")]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", -1),
        ("epoch", True),
        ("epoch", 0),  # there is a row of an epoch
        ("rows", [3]),
        ("rows", [{"epoch": 0, "loss": 1.0}]),
        ("stopping", [["x", 1.0, 1, 1.0], None, None, ""]),
        ("stopping", [BEST, "x", None, ""]),
        ("stopping", [BEST, 1.0, "mood", ""]),
        ("stopping", [BEST, 1.0, "patience", None]),
        ("epochs_before", -1),
        ("fingerprint", [{}, "SGD"]),
        ("fingerprint", [{}, 3, None]),
        ("count", 0),
        ("members", []),
        ("members", [0, 0]),
        ("members", ["../../x"]),
    ],
    ids=repr,
)
def test_invalid_values_in_the_header_are_damage(kept, tmp_path, field, value):
    outcome = resumed_with(kept, tmp_path, lambda header: header.update({field: value}))

    assert isinstance(outcome, SaveError)
    assert "is damaged" in str(outcome)


@pytest.mark.parametrize(
    "remaining",
    [
        [["x", []]],
        [[0, [[0, 1]]]],
        [[0, [[0, 3, 2]]]],
        [[0, [[-1, 0, 2]]]],
        [[0, [[0, 0, 5]]]],  # of a part of 4 rows
        [[0, [[0, 0, -1]]]],  # the part has a known length
        [[0, [[6, 0, 4]]]],  # of 6 parts
    ],
    ids=repr,
)
def test_invalid_remaining_rows_are_damage(in_an_epoch, tmp_path, remaining):
    def change(header):
        order, _, departed = header["sync_point"]
        header["sync_point"] = [order, remaining, departed]

    outcome = resumed_with(in_an_epoch, tmp_path, change)

    assert isinstance(outcome, SaveError), outcome
    assert "is damaged" in str(outcome)


def test_remaining_rows_of_other_data_are_refused(in_an_epoch, tmp_path):
    def change(header):
        header["sync_point"][0] += 1

    outcome = resumed_with(in_an_epoch, tmp_path, change)

    assert isinstance(outcome, OptionError)
    assert "the data, their partitioning, seed or shuffle have changed" in str(outcome)
