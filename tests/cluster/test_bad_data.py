"""What cannot be trained on is refused by name: at once, or by whoever reads it."""

import asyncio
import re
import threading
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import torch
from distributed import Client
from torch import nn

from daskdl import Callback, DataError, EarlyStopping, ModelError, OptionError
from daskdl import data as daskdl_data
from tests.support.kinds import (
    NAMES,
    Given,
    Items,
    Joining,
    Where,
    X,
    Y,
    blocks,
    files,
    frame,
    save_npz,
    tables,
)
from tests.support.problems import mlp, plain, trainer


def fit(client, data, options=(), **fit_options):
    options = {"model": Joining, "optimizer": plain, **dict(options)}
    fitted = trainer(client, **options)
    fitted.fit(data.x, data.y, batch_size=8, **data.options, **fit_options)
    return fitted


def changed(array, position, value):
    array = array.copy()
    array[position] = value
    return array


def uneven_tables():
    table = tables()
    return Given(table[NAMES], table["label"].repartition(npartitions=2))


def lazy_positive():
    x, _ = blocks(30, 30)
    return x[x[:, 0] > 0]


# What the client sees by itself, before it asks a worker for anything.
DATA = {
    "partitions": (uneven_tables, "equally many partitions, got 3 of X, 2 of y part"),
    "y and Dataset": (
        lambda: Given(Items(), Y),
        "y must be None for an Items, which includes its labels",
    ),
    "too large": (
        lambda: Given(X, changed(Y, 3, 4)),
        r"y\[3\] is 4, .* must be in \[0, 3\)",
    ),
    "no folder": (lambda: Given("/nowhere/x"), "there are no files at /nowhere/x"),
}


@pytest.mark.parametrize(("make", "message"), DATA.values(), ids=DATA)
def test_data_are_refused_before_a_worker_is_asked(untouched, make, message):
    with pytest.raises(DataError, match=message):
        fit(untouched, make())


VALIDATION = {
    "lengths": ((X, Y[:-1]), DataError, "validation: X and y must have the same leng"),
    "label": ((X, changed(Y, 7, 9)), DataError, r"validation: y\[7\] is 9, but the mo"),
    "narrow": ((X[:, :3], Y), ModelError, "validation: model failed on 2 rows of X"),
    "no labels": (X, OptionError, r"validation: y must be given, or data of pairs"),
}


@pytest.mark.parametrize(
    ("validation", "error", "message"), VALIDATION.values(), ids=VALIDATION
)
def test_data_to_validate_with_are_too(untouched, validation, error, message):
    with pytest.raises(error, match=message):
        fit(untouched, Given(X, Y), validation=validation)


class Locked(nn.Sequential):
    """It holds what cannot be pickled."""

    def __init__(self):
        super().__init__(Joining())
        self.lock = threading.Lock()


class LockedCallback(Callback):
    def __init__(self):
        self.lock = threading.Lock()

    def on_step_end(self, step):
        """It would have to travel."""


def locked_loss():
    loss = nn.CrossEntropyLoss()
    loss.lock = threading.Lock()
    return loss


PARTS = {
    "locked": ({"model": Locked()}, r"model\.lock \(a _thread\.lock\) cannot"),
    "locked loss": ({"loss": locked_loss()}, r"loss\.lock \(a _thread\.lock\) cannot"),
    "locked callback": (
        {"callbacks": [LockedCallback()]},
        r"trainer\.callbacks\[0\]\.lock \(a _thread\.lock\) cannot be pickled",
    ),
}


@pytest.mark.parametrize(("options", "message"), PARTS.values(), ids=PARTS)
def test_so_are_models_losses_optimizers_and_callbacks(untouched, options, message):
    with pytest.raises(ModelError, match=message):
        fit(untouched, Given(X, Y), options)


OPTIONS = {
    "stopping": (
        {"callbacks": [EarlyStopping(patience=1)]},
        {},
        "monitor='val_loss' needs validation data",
    ),
    "accuracy": (
        {"callbacks": [EarlyStopping("val_accuracy", patience=1)]}
        | {"model": lambda: nn.Linear(4, 1), "loss": nn.MSELoss()},
        {"validation": (X, X[:, :1])},
        "monitor='val_accuracy' needs labels that are class indices",
    ),
}


@pytest.mark.parametrize(
    ("options", "fit_options", "message"), OPTIONS.values(), ids=OPTIONS
)
def test_so_are_options_that_do_not_go_with_the_data(
    untouched, options, fit_options, message
):
    y = X[:, :1] if "loss" in options else Y
    with pytest.raises(OptionError, match=message):
        fit(untouched, Given(X, y), options, **fit_options)


class TestClient:
    def test_text_is_refused(self):
        with pytest.raises(OptionError, match="client must be a distributed"):
            trainer("tcp://127.0.0.1:8786").fit(X, Y)

    def test_a_closed_one_is_refused(self, idle):
        with Client(idle.cluster, set_as_default=False) as closed:
            pass

        with pytest.raises(OptionError, match=r"'closed'; create a new one"):
            trainer(closed).fit(X, Y)

    def test_an_asynchronous_one_is_refused(self, untouched):
        async def fit():
            async with Client(
                untouched.cluster.scheduler_address,
                asynchronous=True,
                set_as_default=False,
            ) as client:
                trainer(client).fit(X, Y)

        with pytest.raises(OptionError, match="asynchronous=True; use Client"):
            asyncio.run(fit())

    def test_a_cluster_without_workers_is_refused(self, no_workers):
        with pytest.raises(OptionError, match="has no workers; wait for some with"):
            fit(no_workers, Given(X, Y))

    def test_a_lazy_prediction_needs_a_cluster_that_stays(self, monkeypatch):
        def none():
            raise ValueError

        monkeypatch.setattr("daskdl.util.default_client", none)
        unfitted = trainer(None)
        unfitted.model_ = mlp()

        with pytest.raises(OptionError, match="lazy outputs need a client, because"):
            unfitted.predict(blocks()[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the workers have the device")
def test_a_device_that_a_worker_has_not(client):
    message = (
        r"^replica \d on \w+://.*: device 'cuda' does not exist: torch finds 0 CUDA"
    )

    with pytest.raises(OptionError, match=f"{message}.*use device='auto'"):
        fit(client, Given(X, Y), {"device": "cuda"})


def damaged_npz(where):
    url = files(where, ".npz", save_npz)
    (where.folder / "1.npz").write_bytes(b"nonsense")
    return Given(url)


def npz(where, loader):
    return Given(daskdl_data.files(files(where, ".npz", save_npz), loader))


def missing_value(where):
    import dask.dataframe as dd

    table = frame().assign(label=Y)
    table.loc[40, "b"] = np.nan
    lazy = dd.from_pandas(table, npartitions=3)
    return Given(lazy[NAMES], lazy["label"])


def with_label(row, value):
    x, _ = blocks(30, 30)
    return x, da.from_array(changed(Y, row, value), chunks=30)


# What only those see who read the data.
ON_READING = {
    "damaged": (damaged_npz, r"cannot read \S*/1\.npz: "),
    "names": (
        lambda w: npz(w, daskdl_data.Npz(y="target")),
        r"\S*\.npz must have an array named 'target', but has \['x', 'y'\]",
    ),
    "missing": (missing_value, "column 'b' of X of part 1 has 1 missing values; fill"),
    "label": (
        lambda w: Given(*with_label(67, 9)),
        r"^replica \d on tcp://\S+: y of part 2 of the train data\[7\] is 9.*"
        r" in \[0, 3",
    ),
    "rows": (
        lambda w: Given(lazy_positive(), da.from_array(Y, chunks=30)),
        r"replica \d on tcp://\S+: arrays of part \d must have equally many "
        r"rows, got \d+ of X, 30 of y; give X and y the same partitions",
    ),
}


@pytest.mark.parametrize(("make", "message"), ON_READING.values(), ids=ON_READING)
def test_what_reading_shows_is_named(client, tmp_path, make, message):
    with pytest.raises(DataError, match=message):
        fit(client, make(Where(client, tmp_path)))


def test_a_wrong_label_in_a_block_of_validation_data_is_named(client):
    with pytest.raises(
        DataError, match=r"y of part 1 of the validation data\[4\] is -3"
    ):
        fit(client, Given(X, Y), validation=with_label(34, -3))


def test_what_the_users_own_loader_raises_comes_out_with_the_file(client, tmp_path):
    def failing(path):
        raise ZeroDivisionError("of one's own")

    with pytest.raises(ZeroDivisionError, match="of one's own") as caught:
        fit(client, npz(Where(client, tmp_path), failing))
    assert re.fullmatch(r"in \S*\.npz", caught.value.__notes__[0])


def test_one_bad_packed_file_is_named_or_left_out_and_counted(client, tmp_path):
    rows = 2  # of each file
    urls = daskdl_data.pack(
        np.tile(X, (3, 1))[: 100 * rows],
        np.tile(Y, 3)[: 100 * rows],
        url=str(tmp_path),
        per_file=rows,
        client=False,
    )
    path = Path(urls[57])
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    arguments = Given(str(tmp_path))

    with pytest.raises(
        DataError, match=r"packed-000057\.safetensors is damaged: .*; p"
    ):
        fit(client, arguments)
    fitted = fit(client, arguments, on_bad_batch="skip", epochs=2)
    assert fitted.history_.column("examples") == [198, 198]
    assert fitted.history_.column("skipped_examples") == [2, 2]
    assert fitted.evaluate(str(tmp_path), on_bad_batch="skip")["loss"] > 0
