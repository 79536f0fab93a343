"""What data that cannot be used are told: each message has the remedy that fits."""

import collections
import io

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from scipy import sparse
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import daskdl

ROWS, CLASSES = 8, 3
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
Y = np.arange(ROWS) % CLASSES
ONE_HOT = np.eye(CLASSES, dtype=int)[Y]
YES = Y > 1
NAMES = np.array(["ant", "bee", "cat"])[Y]
DATASET = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
PIECE = np.arange(6.0)


class TwoInputs(nn.Module):
    """Takes its inputs by name, as most language models do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, CLASSES)

    def forward(self, a, b):
        return self.layer(a) + self.layer(b)


class OneBatch(TwoInputs):
    def forward(self, batch):
        return self.layer(batch["a"])


class Nested(TwoInputs):
    def forward(self, batch):
        return self.layer(batch["a"]["b"])


class Encoding(collections.UserDict):
    """What a tokenizer returns: a mapping, and no dict."""


def one_output():
    return nn.Linear(3, 1)


def probability():
    return nn.Sequential(one_output(), nn.Sigmoid())


def fit(x, y=None, model=None, loss=None, **options):
    trainer = daskdl.Trainer(
        model or nn.Linear(3, CLASSES),
        loss or nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        client=False,
    )
    trainer.fit(x, y, batch_size=4, **options)


def told(x, y=None, **options):
    with pytest.raises((daskdl.DataError, daskdl.ModelError)) as caught:
        fit(x, y, **options)
    return str(caught.value)


def pieces(*lengths):
    return [PIECE[:length] for length in lengths]


ROW_EACH = "give an array with one row for each example"
STREAM = (
    "stack them, numpy.stack(list({0})), or stream them with daskdl.data.Stream or a "
    "torch IterableDataset"
)
OF_DATASET = "a dataset has inputs and labels together: give it as X, without y"


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (range(8), "got a range; convert it with numpy.asarray(X)"),
        (1.5, f"got a float; {ROW_EACH}"),
        (3, f"got an int; {ROW_EACH}"),
        (np.float32(3), f"got a numpy.float32; {ROW_EACH}"),
        (None, f"got None; {ROW_EACH}"),
        (object(), f"got an object; {ROW_EACH}"),
        ((row for row in X), f"got a generator; {STREAM.format('X')}"),
        (map(abs, X), f"got a map; {STREAM.format('X')}"),
        ({"q": "good film"}, "X['q'] must be a numpy array, a torch tensor or a "
         "dask.array, got a str; pass paths and URLs of files as X, without y; "
         "convert text to numbers first, for example with a tokenizer"),
        (b"123", "got a bytes; read it with numpy.frombuffer(X, dtype=...)"),
        (bytearray(b"12"), "got a bytearray; read it with numpy.frombuffer(X, dtype="),
        (lambda: X, "got a function; give what it returns"),
        (sparse.eye(3).tocsr(), "csr_matrix; make it dense with X.toarray()"),
        ((DATASET, X), f"got a torch.TensorDataset; {OF_DATASET}"),
        (np.array(pieces(3, 4), dtype=object), "got dtype object; pad its arrays to "
         "one shape, then numpy.stack(X)"),
        (np.array([*NAMES]), "got dtype <U3; encode them as numbers"),
        (np.array([*NAMES], dtype=object), "got dtype object; encode them as numbers"),
        (np.array([1, 2.5], dtype=object), "got dtype object; convert it, for "
         "example with X.astype(numpy.float32)"),
    ],
    ids=[
        "range", "float", "int", "numpy scalar", "None", "object",
        "generator", "map", "text", "bytes", "bytearray",
        "function", "sparse", "inner dataset", "array of arrays",
        "strings", "string objects", "number objects",
    ],
)  # fmt: skip
def test_inputs_of_another_kind_are_told_what_makes_an_array_of_them(x, message):
    assert message in told(x)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ({"a": NAMES}, "got dtype <U3; number the classes, numpy.unique(y['a'], "
         "return_inverse=True)[1]"),
        (np.array(["ant", None] * 4), "got dtype object; number the classes, "),
        ("labels.npy", "y must be a numpy array, a torch tensor or a dask.array, got "
         "a str; pass paths and URLs of files as X, without y"),
        (DATASET, f"got a torch.TensorDataset; {OF_DATASET}"),
        (DataLoader(DATASET), f"got a torch.DataLoader; {OF_DATASET}"),
        (iter(Y), f"got an iterator; {STREAM.format('y')}"),
    ],
    ids=["strings", "objects", "path", "dataset", "loader", "iterator"],
)  # fmt: skip
def test_labels_of_another_kind_are_told_what_makes_an_array_of_them(y, message):
    assert message in told(X, y)


GAPS = (
    "drop rows whose label is missing (NaN), or fill in -100 before, which the loss "
    "ignores"
)
AS_FLOAT = "y.astype('float32')"
BCE, LOGITS = nn.BCELoss(), nn.BCEWithLogitsLoss()


@pytest.mark.parametrize(
    ("y", "model", "loss", "remedy"),
    [
        (ONE_HOT, None, None, "take class indices, y.argmax(1)"),
        (ONE_HOT.astype(np.uint8), None, None, "take class indices, y.argmax(1)"),
        (ONE_HOT.astype(bool), None, None, "take class indices, y.argmax(1)"),
        (ONE_HOT, None, functional.cross_entropy, "take class indices, y.argmax(1)"),
        (Y.reshape(-1, 1), None, None, "use y.ravel()"),
        (Y.reshape(-1, 1), None, nn.NLLLoss(), "use y.ravel()"),
        (Y.reshape(-1, 1).astype(float), None, None,
         f"use y.ravel().astype('int64'); {GAPS}"),
        (Y.astype(np.float32), None, None, f"use y.astype('int64'); {GAPS}"),
        (YES, None, None, "use y.astype('int64')"),
        (YES, one_output, LOGITS, f"use {AS_FLOAT}.reshape(-1, 1)"),
        (YES, probability, BCE, f"use {AS_FLOAT}.reshape(-1, 1)"),
        (YES.astype(int), one_output, LOGITS, f"use {AS_FLOAT}.reshape(-1, 1)"),
        (YES.astype(int), probability, BCE, f"use {AS_FLOAT}.reshape(-1, 1)"),
        (YES.reshape(-1, 1), one_output, LOGITS, f"use {AS_FLOAT}"),
        (YES.reshape(-1, 1).astype(int), probability, BCE, f"use {AS_FLOAT}"),
        (ONE_HOT, None, LOGITS, f"use {AS_FLOAT}"),
        (YES.astype(np.float32), one_output, LOGITS, "use y.reshape(-1, 1)"),
        (YES.astype(int), probability, functional.binary_cross_entropy,
         f"use {AS_FLOAT}.reshape(-1, 1)"),
        (X[:, 0], one_output, nn.MSELoss(), "use y.reshape(-1, 1)"),
        (Y, None, LOGITS, "for class indices use CrossEntropyLoss"),
    ],
    ids=[
        "one-hot", "one-hot uint8", "one-hot bool", "one-hot, function", "column",
        "column, nll", "float column", "float", "bool", "bool, logits", "bool, bce",
        "int, logits", "int, bce", "bool column, logits", "int column, bce",
        "several labels", "float, logits", "int, function", "mse", "classes, logits",
    ],
)  # fmt: skip
def test_labels_that_a_loss_does_not_take_are_told_what_fits(y, model, loss, remedy):
    message = told(X, y, model=model and model(), loss=loss)

    assert message.startswith("loss failed on two rows")
    assert message.endswith(f"; {remedy}")


def test_labels_of_which_some_are_missing_are_accepted_as_is_advised():
    gaps = np.where(Y == 0, np.nan, Y)

    assert told(X, gaps).endswith(f"use y.astype('int64'); {GAPS}")
    fit(X, np.where(np.isnan(gaps), -100, gaps).astype("int64"))
    fit(X[~np.isnan(gaps)], gaps[~np.isnan(gaps)].astype("int64"))


def test_what_fits_is_accepted():
    fit(X, ONE_HOT.argmax(1))
    fit(X, YES.astype("float32").reshape(-1, 1), model=one_output(), loss=LOGITS)
    fit(X, np.unique(NAMES, return_inverse=True)[1])
    fit({"a": X, "b": X}, Y, model=OneBatch())
    fit(Encoding(a=X), Y, model=OneBatch())
    fit({"a": Encoding(b=X)}, Y, model=Nested())
    fit({"a": X, "b": X}, Y, model=TwoInputs())
    fit((X, X), Y, model=TwoInputs())


def test_a_loss_of_ones_own_that_fails_is_given_no_advice():
    def loss(output, y):
        raise ValueError("mine")

    assert told(X, Y, loss=loss).endswith(": mine")


ONE_ARGUMENT = (
    "forward of Linear takes 'input', but X, {}, is passed as one argument: rename the "
    "keys of a dict to the names of the arguments, pass a tuple with one array for "
    "each, or unpack X in "
    "forward(self, batch)"
)
TOKENS = np.zeros((ROWS, 3), int)


@pytest.mark.parametrize(
    ("x", "model", "remedy"),
    [
        ({"a": X}, lambda: nn.Linear(3, CLASSES), ONE_ARGUMENT.format("{'a': .}")),
        ((X, X), lambda: nn.Linear(3, CLASSES), ONE_ARGUMENT.format("(., .)")),
        (X, TwoInputs, "forward of TwoInputs takes 'a', 'b': give X as a dict with "
         "these keys, or as a tuple"),
        ({"a": TOKENS}, OneBatch, "if these are quantities, not indices, use "
         "X['a'].astype('float32')"),
        (TOKENS, None, "if these are quantities, not indices, use "
         "X.astype('float32')"),
    ],
    ids=["dict", "tuple", "one of two", "indices in a dict", "indices"],
)  # fmt: skip
def test_a_model_that_fails_on_inputs_is_told_what_it_gets(x, model, remedy):
    message = told(x, Y, model=model and model())

    assert message.startswith("model failed on 2 rows of X")
    assert message.endswith(f"; {remedy}")


class Forbidden(MemoryFileSystem):
    """A bucket whose server answers each request with 403."""

    protocol = "forbidden"

    def info(self, path, **options):
        raise PermissionError(f"Forbidden: {path}")

    def find(self, path, **options):
        raise PermissionError(f"Forbidden: {path}")


def test_what_a_server_refuses_about_a_pattern_is_about_the_pattern():
    fsspec.register_implementation(Forbidden.protocol, Forbidden, clobber=True)

    message = told("forbidden://bucket/x/*.npz")

    assert "manifest.json" not in message
    assert "cannot list forbidden://bucket/x on " in message


@pytest.mark.parametrize(
    "url", ["memory://data-messages/*.npz", "{}/*.npz"], ids=["memory", "local"]
)
def test_a_pattern_without_a_file_says_so(url, tmp_path):
    url = url.format(tmp_path)

    assert told(url) == f"there are no files that match {url}"


def test_a_pattern_of_files_that_are_there_is_read():
    content = io.BytesIO()
    np.savez(content, x=X, y=Y)
    system = fsspec.filesystem("memory")
    system.pipe("/data-messages-there/a.npz", content.getvalue())

    fit("memory://data-messages-there/*.npz")

    system.rm("/data-messages-there", recursive=True)


@pytest.mark.parametrize("text", ["a good film", ["a good film", "a bad one"]])
def test_text_is_told_that_it_was_taken_for_a_path(text):
    assert told(text).endswith(
        "a good film: a str is the path or URL of files; convert text to "
        "numbers first, for example with a tokenizer"
    )
    assert told(text, Y).startswith(
        "y must be None for paths or URLs of files, which include their labels; "
        "pass validation data as validation=..., the name of labels as label=...; "
        "convert text to numbers first"
    )
