"""A fit among threads that goes on from a checkpoint is the one that was never stopped.

Each test of that trains to the end once, and once more from a checkpoint on the way. A
trainer that was saved and loaded goes on as the one that was saved, too.
"""

import functools
import itertools
import math

import dask
import dask.array as da
import numpy as np
import pytest
import torch
import xarray
import zarr
from torch import nn
from torch.optim import lr_scheduler

from daskdl import (
    AdaptiveThreshold,
    Callback,
    Checkpoint,
    EarlyStopping,
    Evaluate,
    FixedThreshold,
    GradientSharing,
    OptionError,
    ParameterAveraging,
    ReplicaError,
    ResidualClipping,
    SaveError,
    Trainer,
)
from daskdl.saving.checkpoints import COMMON, Part, Series, complete_at, of_replica
from daskdl.training import gradient_sharing
from tests.support.problems import adam, halved, nesterov, rows, sgd

X, Y = rows(120, features=6)
TEST = rows(
    40, features=6, seed=5
)  # other classes: the better on X, the worse on these
TIMES = {"seconds", "examples_per_s", "waits"}
# Where replicas meet every few steps only, it depends on who is faster.
PACE = {"staleness"}
_numbers = itertools.count()


def sharing(replicas=2, **options):
    """In step, so that a run is repeatable."""
    options = {"threshold": AdaptiveThreshold(1e-2), **options}
    return GradientSharing(max_staleness=0, replicas_per_worker=replicas, **options)


def averaging(replicas=2, **options):
    return ParameterAveraging(3, replicas_per_worker=replicas, **options)


class Adam(torch.optim.Adam):
    """Of the name that torch's own has."""


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def dropping():
    return nn.Sequential(net(), nn.Dropout(0.3))


class Tied(nn.Module):
    """With weights that are shared, and some that are frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 4)

    def forward(self, x):
        return self.last(self.frozen(self.second(self.first(x).relu())))


class Mixed(nn.Module):
    """Of two types, each a vector of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4).double()

    def forward(self, x):
        return self.last(self.first(x).double())


def by_layer(parameters):
    groups = [{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(parameters)]
    return torch.optim.SGD(groups, momentum=0.9)


# `torch.compile` as in use, but without a C compiler.
compiled = functools.partial(torch.compile, backend="eager")
# Models and what an error calls them.
WRAPPED = {
    "compiled": (lambda: compiled(net()), r"wrapped in torch\.compile"),
    "data parallel": (
        lambda: nn.DataParallel(net()),
        r"wrapped in torch\.nn\.DataParallel",
    ),
    "a compiled part": (
        lambda: nn.Sequential(*map(compiled, net())),
        r"wrapped in torch\.compile",
    ),
    "a parallel part": (
        lambda: nn.Sequential(*map(nn.DataParallel, net())),
        r"wrapped in torch\.nn\.DataParallel",
    ),
}


@pytest.fixture
def url():
    """Of a new folder in memory."""
    new_url = f"memory://local-checkpoints-{next(_numbers)}"
    yield new_url
    Series.at(new_url).store.delete_all()


@pytest.fixture(autouse=True)
def keeps_residuals(monkeypatch):
    """Let replicas keep residuals, though epochs have few exchanges."""
    monkeypatch.setattr(gradient_sharing, "FEW_EXCHANGES", 0)


def one_of(url, callbacks=(), keep=None, **options):
    """A trainer with a checkpoint after each epoch; all are kept."""
    keep = {"keep_last": None, **(keep or {})}
    chosen = {"model": net, "optimizer": adam, "master": sharing(), **options}
    return Trainer(
        loss=nn.CrossEntropyLoss(),
        client=False,
        progress=False,
        telemetry_every=None,
        callbacks=[Checkpoint(url, **keep), *callbacks],
        **chosen,
    )


def fits(trainer, epochs=3, **options):
    return trainer.fit(X, Y, epochs=epochs, batch_size=10, **options)


def at(url, number):
    return Series.at(url).folder(number).url


def assert_same(ours, theirs, but=TIMES):
    """Two trainers have come to the same, bit for bit."""
    assert alike(state_of(ours), state_of(theirs))
    assert len([*ours.model_.parameters()]) == len([*theirs.model_.parameters()])
    assert len(ours.history_) == len(theirs.history_)
    for row, expected in zip(ours.history_, theirs.history_, strict=True):
        assert row.keys() == expected.keys()
        differ = {
            n: (row[n], expected[n]) for n in row if not alike(row[n], expected[n])
        }
        assert differ.keys() <= but, differ


def state_of(trainer):
    scheduler = trainer.scheduler_
    return {
        "model": dict(trainer.model_.state_dict()),
        "optimizer": trainer.optimizer_.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
    }


def alike(value, expected):
    if isinstance(value, torch.Tensor):
        return torch.equal(value, expected)
    if isinstance(value, dict):
        same = value.keys() == expected.keys()
        return same and all(alike(value[name], expected[name]) for name in value)
    if isinstance(value, list):
        return len(value) == len(expected) and all(map(alike, value, expected))
    both_nan = isinstance(value, float) and math.isnan(value) and math.isnan(expected)
    return both_nan or value == expected


CASES = {
    "sharing": {},
    "strict, not each step": {"master": sharing(apply="strict", exchange_every=4)},
    "warm-up": {"master": sharing(warmup_steps=8)},  # 6 in an epoch
    "thresholds by layer": {
        "master": sharing(
            threshold={"*.bias": FixedThreshold(1e-3), "*": AdaptiveThreshold(1e-2)}
        )
    },
    "clipped": {"master": sharing(residual=ResidualClipping(2.0, 4))},
    "three": {"master": sharing(3), "optimizer": sgd},
    "one": {"master": sharing(1), "model": dropping},
    "averaging, with an outer optimizer": {"master": averaging(outer=nesterov)},
    "averaging, compressed": {
        "master": averaging(3, compression="dense8", outer=nesterov),
        "optimizer": sgd,
    },
    "each epoch another rate": {
        "scheduler": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5)
    },
    "each step another rate and momentum": {
        "optimizer": sgd,
        "scheduler": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=18),
        "scheduler_every": "step",
    },
    "plateau": {
        "scheduler": lambda o: lr_scheduler.ReduceLROnPlateau(
            o, patience=0, threshold=9
        )
    },
    "bfloat16": {"autocast": torch.bfloat16, "master": sharing(1)},
    "float16": {"autocast": torch.float16, "accumulate": 2},
    "half, strict": {
        "model": lambda: nn.Linear(6, 4).half(),
        "optimizer": sgd,  # Adam's eps is 0 in float16, and what it divides is inf
        "master": sharing(apply="strict"),
    },
    "tied and frozen": {"model": Tied},
    "two types": {"model": Mixed},
    "groups of parameters": {"optimizer": by_layer},
    **{name: {"model": model} for name, (model, _) in WRAPPED.items()},
}


MASTERS = {
    "sharing": sharing(),
    "strict": sharing(apply="strict", exchange_every=3),
    "one": sharing(1),
    "averaging": averaging(average_optimizer=False, outer=nesterov),
    "averaging, compressed": averaging(compression="dense8"),
}


@pytest.mark.parametrize(
    ("master", "which"),
    [
        *(pytest.param(master, 0, id=name) for name, master in MASTERS.items()),
        pytest.param(sharing(), -1, id="sharing, the last"),
    ],
)
@pytest.mark.parametrize("few", [0, 4], ids=["", "whole residuals"])
def test_a_fit_resumed_within_an_epoch_is_the_same(
    master, which, few, url, one_thread, monkeypatch
):
    monkeypatch.setattr(
        gradient_sharing, "FEW_EXCHANGES", few
    )  # steps between checkpoints: 2
    options = {"keep": {"every": "4 steps"}, "master": master}
    whole, resumed = one_of(url, **options), one_of(f"{url}-later", **options)
    fits(whole)
    series = Series.at(url)
    within_epochs = [
        n
        for n in series.numbers()
        if complete_at(series.folder(n)).header["sync_point"] is not None
    ]
    number = within_epochs[which]

    fits(resumed, resume=at(url, number))

    # What is counted in an epoch is not in the checkpoint, but for losses and examples.
    assert alike(state_of(resumed), state_of(whole))
    for name in ("loss", "examples"):
        assert resumed.history_.column(name) == whole.history_.column(name)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_resumed_fit_and_a_loaded_trainer_are_the_same(
    options, url, one_thread, tmp_path
):
    whole, resumed = one_of(url, **options), one_of(f"{url}-later", **options)
    fits(whole)
    whole.save(tmp_path)
    loaded = loaded_from(tmp_path, **{"model": net, "optimizer": adam, **options})

    fits(resumed, resume=at(url, 1))

    every = getattr(whole.master, "exchange_every", 1)
    but = TIMES if every in (1, "auto") else TIMES | PACE
    assert_same(resumed, whole, but)
    assert Series.at(f"{url}-later").numbers() == [1, 2]
    assert_same(loaded, whole, set())
    whole.callbacks = []
    for trainer in (whole, loaded):
        fits(trainer, 2)
    assert_same(loaded, whole, but)


BESIDE = {
    "zarr beside numpy": (lambda: zarr.array(X, chunks=(50, 6)), Y),
    "xarray beside torch": (
        lambda: xarray.DataArray(da.from_array(X, ((30, 0, 90), 6))),
        torch.from_numpy(Y),
    ),
}


@pytest.mark.parametrize("master", [sharing(), averaging()], ids=["sharing", "average"])
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_a_fit_of_lazy_rows_beside_labels_in_memory_is_resumed_and_stopped(
    beside, master, url, one_thread
):
    x, y = beside
    data = {
        "sample_weight": np.arange(len(X)) % 3,
        "validation": (x(), y, np.ones(len(X))),
        "batch_size": 10,
    }
    stops = EarlyStopping("loss", patience=1, min_delta=1e9)  # after the second epoch
    whole, resumed = one_of(url, master=master), one_of(f"{url}-later", master=master)
    stopped = one_of(f"{url}-stopped", [stops], master=master)
    whole.fit(x(), y, epochs=3, **data)

    resumed.fit(x(), y, epochs=3, resume=at(url, 1), **data)
    stopped.fit(x(), y, epochs=3, **data)

    assert_same(resumed, whole)
    assert stopped.history_.column("loss") == whole.history_.column("loss")[:2]


def loaded_from(folder, **passed):
    """A trainer from a save, without its checkpoints."""
    names = ("model", "optimizer", "scheduler", "loss")
    passed = {"loss": nn.CrossEntropyLoss(), "callbacks": [], **passed}
    chosen = {name: passed[name] for name in (*names, "callbacks") if name in passed}
    return Trainer.load(folder, client=False, trusted=["tests"], **chosen)


def test_a_loaded_trainer_predicts_and_scores_the_same(url, tmp_path):
    trainer = one_of(url)
    trainer.telemetry_every = 1
    fits(trainer, 1)
    trainer.save(tmp_path)

    loaded = Trainer.load(tmp_path, client=False, trusted=["tests"])

    assert (loaded.predict(X) == trainer.predict(X)).all()
    assert loaded.evaluate(X, Y) == trainer.evaluate(X, Y)
    assert loaded.history_.steps[-1]["step"] == trainer.history_.steps[-1]["step"]


class TestWhere:
    def test_a_resumed_fit_is_resumed(self, url, one_thread):
        whole = one_of(f"{url}-whole")
        fits(whole)
        for epochs in (1, 2):
            fits(one_of(url), epochs, resume=True)
        third = one_of(url)

        fits(third, resume=True)

        assert_same(third, whole)
        assert Series.at(url).numbers() == [1, 2, 3]
        within_epochs = [
            complete_at(Series.at(url).folder(number)) for number in (1, 2, 3)
        ]
        assert len({checkpoint.stamp.origin for checkpoint in within_epochs}) == 1
        assert len({checkpoint.stamp.run for checkpoint in within_epochs}) == 3
        assert [checkpoint.header["count"] for checkpoint in within_epochs] == [1, 2, 3]

    def test_a_second_fit_is_resumed(self, url, one_thread):
        options = {"scheduler": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5)}
        whole, resumed = one_of(url, **options), one_of(f"{url}-later", **options)
        fits(whole, 1)
        fits(whole, 2)  # has checkpoints 2 and 3

        fits(resumed, 2, resume=at(url, 2))

        assert_same(resumed, whole)

    @pytest.mark.parametrize(
        "master", [sharing(), averaging(), sharing(1)], ids=["two", "averaging", "one"]
    )
    def test_a_finished_fit_is_resumed_without_training(self, url, master, one_thread):
        whole, resumed = one_of(url, master=master), one_of(url, master=master)
        fits(whole, 2)

        fits(resumed, 2, resume=True)

        assert_same(resumed, whole)
        assert Series.at(url).numbers() == [1, 2]


class TestScores:
    def test_scores_of_some_epochs(self, url, one_thread):
        make = functools.partial(
            one_of,
            callbacks=[Evaluate(every=2)],
            scheduler=lambda o: lr_scheduler.ReduceLROnPlateau(
                o, patience=0, threshold=9
            ),
        )
        whole, resumed = make(url), make(f"{url}-later")
        fits(whole, 4, validation=TEST)

        fits(resumed, 4, validation=TEST, resume=at(url, 1))

        assert_same(resumed, whole)
        losses = resumed.history_.column("val_loss")
        assert [math.isnan(loss) for loss in losses] == [True, False, True, False]

    @pytest.mark.parametrize(
        "master", [sharing(), sharing(1), averaging()], ids=["two", "one", "averaging"]
    )
    def test_the_best_model_is_restored(self, url, master, one_thread):
        make = functools.partial(
            one_of,
            callbacks=[EarlyStopping(patience=2)],
            master=master,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        )
        whole, resumed, ended = make(url), make(f"{url}-later"), make(f"{url}-ended")
        stopping = fits(whole, 20, validation=TEST).stopping
        best, last = stopping.best_epoch, len(whole.history_)
        assert last == best + 3 < 20

        # It ends before it could find the best by itself.
        later = fits(resumed, 20, validation=TEST, resume=at(url, best + 2)).stopping
        stays = fits(ended, 20, validation=TEST, resume=at(url, last)).stopping

        assert stopping.restored
        assert later == stays == stopping
        assert_same(resumed, whole)
        assert_same(ended, whole)
        assert Series.at(f"{url}-ended").numbers() == []

    def test_with_more_patience_a_finished_fit_continues(self, url):
        fits(one_of(url, [EarlyStopping("loss", patience=1, min_delta=9)]), 5)
        assert len(Series.at(url).numbers()) == 2

        more = one_of(url, [EarlyStopping("loss", patience=3, min_delta=9)])
        assert len(fits(more, 5, resume=True)) == 4
        assert len(fits(one_of(url), 5, resume=True)) == 5


CROWDS = {
    "sharing, three to one": (sharing(3), sharing(1)),
    "sharing, two to three": (sharing(2), sharing(3)),
    "strict, three to two": (sharing(3, apply="strict"), sharing(2, apply="strict")),
    "averaging, two to three": (averaging(2), averaging(3)),
    "apart, two to three": (
        averaging(2, average_optimizer=False),
        averaging(3, average_optimizer=False),
    ),
    "one sharing to three averaging": (sharing(1), averaging(3)),
}


@pytest.mark.parametrize(("before", "after"), CROWDS.values(), ids=CROWDS)
def test_fewer_and_more_replicas_resume_from_the_same_model(before, after, url):
    whole = one_of(url, master=before)
    fits(whole, 2)
    ends, goes_on = one_of(url, master=after), one_of(f"{url}-later", master=after)

    fits(ends, 2, resume=True)  # nothing is left to train
    history = fits(goes_on, resume=Checkpoint(at(url, 2)))

    # No residual is lost: steps of the grid, rounded once for each replica.
    ours, theirs = (dict(t.model_.named_parameters()) for t in (ends, whole))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=3 * 2.0**-24)
    assert history[2]["replicas"] == after.replicas_per_worker
    assert history.column("examples") == [len(X)] * 3
    assert history[2]["loss"] < history[0]["loss"]


def from_one():
    """Some parameters are larger than 1 after a step, which changes the grid."""
    module = net()
    nn.init.ones_(module[-1].bias)
    return module


def test_what_one_has_trained_is_resumed_by_two_in_its_grid(url):
    alone = one_of(url, master=sharing(1), model=from_one)
    fits(alone, 1)
    assert max(p.abs().max() for p in alone.model_.parameters()) > 1
    two = one_of(url, master=sharing(2, warmup_steps=10**6), model=from_one)

    with dask.config.set({"daskdl.timeouts.data": 5, "daskdl.timeouts.silence": 5}):
        history = fits(two, resume=True)

    assert history.column("replicas") == [1, 2, 2]
    assert history.column("refused_messages") == [0, 0, 0]


def test_the_resumed_checkpoints_have_residuals(url):
    """Else the test above would see nothing."""
    fits(one_of(url, master=sharing(3)), 2)

    store = Series.at(url).folder(2)
    shared = Part(store, COMMON).read()[1]["exchange"]["compressor"]
    for replica in range(3):
        exchange = Part(store, of_replica(replica)).read()[1]["exchange"]
        residual = exchange["local"][0] - shared["shared"][0] * shared["grid"]
        assert (residual.abs() > 1e-4).float().mean() > 0.5


@pytest.mark.parametrize("adapts", [True, False])
def test_a_fit_goes_on_with_or_without_an_adapted_rate(adapts, url):
    fits(one_of(url, master=sharing(adapt_rate=not adapts)), 1)

    history = fits(one_of(url, master=sharing(adapt_rate=adapts)), 2, resume=True)

    assert [factor > 1 for factor in history.column("rate_factor")] == [
        not adapts,
        adapts,
    ]


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, 5)


def frozen():
    module = net()
    module[0].requires_grad_(False)
    return module


def with_mask(mask):
    """A model with a buffer that is not in its state dict."""
    module = net()
    module.register_buffer("mask", mask, persistent=False)
    return module


class TestRefused:
    @pytest.mark.parametrize("wrapper", WRAPPED)
    @pytest.mark.parametrize("saved", [True, False], ids=["saved", "not saved"])
    def test_a_save_of_another_wrapper_is_named(self, wrapper, saved, url, tmp_path):
        both = WRAPPED[wrapper], (net, "not wrapped")
        (theirs, there), (ours, here) = both if saved else both[::-1]
        trainer = one_of(url, model=theirs)
        fits(trainer, 1)
        trainer.save(tmp_path)

        message = f"saved model is {there}, and this one is {here}.*saved, {there}"
        with pytest.raises(SaveError, match=message):
            loaded_from(tmp_path, model=ours)
        with pytest.raises(OptionError, match=message):
            fits(one_of(url, model=ours), resume=True)

    def test_a_wrapper_does_not_hide_another_difference(self, url, tmp_path):
        trainer = one_of(url, model=WRAPPED["compiled"][0])
        fits(trainer, 1)
        trainer.save(tmp_path)

        with pytest.raises(SaveError, match=r"_orig_mod\.2.* is missing|missing in"):
            loaded_from(tmp_path, model=nn.Linear(6, 4))

    @pytest.mark.parametrize(
        ("before", "after", "message"),
        [
            (torch.ones(3), None, r"mask is float32 \(3,\), .* there, but missing in"),
            (torch.ones(3), torch.ones(4), r"mask is .*\(3,\), .* but float32 \(4,\)"),
            (None, torch.ones(3), r"mask is missing there, but float32 \(3,\)"),
        ],
        ids=["gone", "another shape", "new"],
    )
    def test_another_buffer_that_is_not_persistent_is_refused(
        self, url, before, after, message
    ):
        fits(one_of(url, model=with_mask(before)), 1)
        changed = one_of(f"{url}-later", model=with_mask(after))

        with pytest.raises(OptionError, match=f"another model, .*: {message}"):
            fits(changed, resume=url)

        assert Series.at(f"{url}-later").numbers() == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"model": lambda: nn.Linear(6, 4)}, "another model, .*: 0.weight is"),
            (
                {"master": averaging()},
                "replicas, which ParameterAveraging cannot resume",
            ),
            ({"optimizer": sgd}, r"the optimizer .*Adam, but this trainer has .*SGD;"),
            (
                {"optimizer": Adam},
                rf"torch.*Adam, but this trainer has {__name__}\.Adam;",
            ),
            ({"model": frozen}, r"0.weight is float32 .* there, but .* not tra"),
        ],
        ids=["model", "master", "optimizer", "of the same name", "frozen"],
    )
    def test_other_options_are_refused(self, url, options, message):
        fits(one_of(url), 1)

        with pytest.raises(OptionError, match=rf"checkpoint-000001 .*{message}"):
            fits(one_of(url, **options), 2, resume=True)

    @pytest.mark.parametrize(("scheduler", "shown"), [(cosine, "Cosine"), (None, "No")])
    def test_another_scheduler_is_refused_but_one_may_be_added(
        self, url, scheduler, shown
    ):
        fits(one_of(url), 1)
        fits(one_of(url, scheduler=halved), 2, resume=True)

        message = f"the scheduler .*StepLR, but this trainer has .*{shown}"
        with pytest.raises(OptionError, match=message):
            fits(one_of(url, scheduler=scheduler), 3, resume=True)

    def test_another_outer_optimizer_is_refused(self, url):
        fits(one_of(url, master=averaging(outer=torch.optim.Adam)), 1)

        with pytest.raises(OptionError, match=rf"a {__name__}\.Adam, .* a torch.*Adam"):
            fits(one_of(url, master=averaging(outer=Adam)), 2, resume=True)

    def test_optimizers_of_a_script_may_move_into_a_module(self, url, monkeypatch):
        options = {"optimizer": Adam, "master": averaging(outer=Adam)}
        with monkeypatch.context() as script:
            script.setattr(Adam, "__module__", "__main__")
            fits(one_of(url, **options), 1)

        assert len(fits(one_of(url, **options), 2, resume=True)) == 2

    def test_a_folder_without_checkpoints_is_refused(self, url):
        with pytest.raises(SaveError, match=r"^memory://.* has no complete checkpoint"):
            fits(one_of(url), 2, resume=url)


def test_only_kept_checkpoints_remain_at_the_end(tmp_path):
    keep = {"keep_last": 1, "keep_best": "val_loss", "every": 2}
    trainer = one_of(tmp_path, keep=keep, master=sharing(1))

    losses = fits(trainer, 7, validation=TEST).column("val_loss")

    taken = losses[1::2] + losses[6:]  # after each second epoch, and the last one
    expected = sorted({taken.index(min(taken)) + 1, 4})
    assert len(expected) == 2
    assert Series.at(tmp_path).numbers() == expected
    folders = {path.name for path in tmp_path.iterdir()}
    assert folders == {f"checkpoint-{number:06d}" for number in expected}


class Fails(Callback):
    """In the second epoch, when the first one's checkpoint has been written."""

    def __init__(self, url):
        self.url = url

    def on_epoch_begin(self, epoch):
        if epoch.epoch == 2:
            raise ValueError("mine")


def notes_of(caught):
    return [n for n in getattr(caught.value, "__notes__", ()) if "checkpoint" in n]


def test_a_fit_that_fails_says_where_the_last_checkpoint_is(url):
    make = functools.partial(one_of, url, keep={"every": 2}, master=sharing(1))
    with pytest.raises(ReplicaError, match="mine") as first:
        fits(make([Fails(url)], keep={"every": 9}))
    fits(make(), 2)

    with pytest.raises(ReplicaError, match="mine") as resumed:
        fits(make([Fails(url)]), resume=True)

    assert "is not written yet" in "".join(notes_of(first))
    assert f"fit(resume=...), is {at(url, 1)}" in "".join(notes_of(resumed))


def test_a_full_disk_ends_the_fit_at_the_next_sync_point(url, monkeypatch):
    write = Part.write

    def fails(part, copy):
        if part.store.url == at(url, 2):
            raise SaveError("the disk is full")
        write(part, copy)

    monkeypatch.setattr(Part, "write", fails)
    trainer = one_of(url)

    with pytest.raises(SaveError, match="the disk is full") as caught:
        fits(trainer, 9)

    assert len(trainer.history_) in (2, 3)
    assert f"is {at(url, 1)}" in "".join(notes_of(caught))
    assert trainer.predict(X).shape == (len(X), 4)
