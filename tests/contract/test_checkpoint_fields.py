"""A checkpoint whose checksums are right, and a field of whose state is wrong.

Whoever writes such a one knows how, so it is no accident that a checksum finds. It is
damage nevertheless: a `SaveError` that names the file and the field.
"""

import random

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from daskdl import (
    Checkpoint,
    DaskDLError,
    GradientSharing,
    OptionError,
    ParameterAveraging,
    SaveError,
    Trainer,
)
from daskdl.saving.checkpoints import Part, Series

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
MASTERS = {
    "sharing": GradientSharing(max_staleness=0, replicas_per_worker=2),
    "averaging": ParameterAveraging(
        replicas_per_worker=2,
        outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9),
    ),
    "alone": GradientSharing(replicas_per_worker=1),
}
# torch makes them anew, or they are not looked at without an EarlyStopping.
UNUSED = {"initial_lr", "monitor", "best_epoch"}


def trainer(kind, *callbacks):
    return Trainer(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        master=MASTERS[kind],
        client=False,
        progress=False,
        scheduler=lambda o: lr_scheduler.StepLR(o, 1),
        callbacks=callbacks,
    )


@pytest.fixture(scope="module", params=MASTERS)
def kept(request, tmp_path_factory):
    """A kind of training, and the newest checkpoint of a fit of one epoch."""
    url = tmp_path_factory.mktemp("checkpoints")
    trainer(request.param, Checkpoint(url)).fit(X, Y, epochs=1, batch_size=4)
    return request.param, Series.at(url).newest().store


def places(value, path=()):
    """Paths of the named fields in plain values, down to tensors."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*path, name)
            yield from places(inner, (*path, name))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from places(inner, (*path, i))


def at(value, path):
    for step in path:
        value = value[step]
    return value


def removed(holder, name):
    del holder[name]


def retyped(holder, name):
    holder[name] = "x" if not isinstance(holder[name], str) else [7]


def resized(holder, name):
    holder[name] = torch.cat([holder[name].reshape(-1)] * 2)


def damages(state):
    """Each wrong thing that is done to a state: how, and where."""
    for path in places(state):
        *outer, name = path
        if name in UNUSED or (outer[-1:] == ["state"] and str(name).startswith("_")):
            continue
        if isinstance(at(state, outer), tuple):
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
        found = outcome(kind, tmp_path)
        assert isinstance(found, SaveError), (how, path, found)
        assert f"{part}.json" in str(found), (how, path)
        assert str(path[0]) in str(found), (how, path)


@pytest.fixture(scope="module")
def in_an_epoch(tmp_path_factory):
    """The first checkpoint of a fit, in the middle of its epoch."""
    url = tmp_path_factory.mktemp("middle")
    own = trainer("sharing", Checkpoint(url, every="2 steps", keep_last=None))
    own.fit(X, Y, epochs=1, batch_size=4)
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
    found = resumed_with(kept, tmp_path, lambda said: how(said, field))

    assert isinstance(found, SaveError | OptionError), found


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
    found = resumed_with(kept, tmp_path, lambda said: said.update({field: value}))

    assert isinstance(found, SaveError)
    assert "is damaged" in str(found)


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
    def change(said):
        order, _, departed = said["sync_point"]
        said["sync_point"] = [order, remaining, departed]

    found = resumed_with(in_an_epoch, tmp_path, change)

    assert isinstance(found, SaveError), found
    assert "is damaged" in str(found)


def test_remaining_rows_of_other_data_are_refused(in_an_epoch, tmp_path):
    def change(said):
        said["sync_point"][0] += 1

    found = resumed_with(in_an_epoch, tmp_path, change)

    assert isinstance(found, OptionError)
    assert "the data, their parts, seed or shuffle are other ones now" in str(found)
