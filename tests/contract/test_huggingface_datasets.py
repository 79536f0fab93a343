"""A `datasets.Dataset` of Hugging Face: its columns are inputs and labels."""

import functools

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler

import daskdl
from daskdl.data import dataset
from daskdl.data.inputs import ReadOptions, source_of

ROWS = 8
IDS = np.arange(3 * ROWS).reshape(ROWS, 3)
LABELS = [i % 2 for i in range(ROWS)]
NAMES = [["dog", "cat"][i] for i in LABELS]
COLUMNS = {"ids": IDS.tolist(), "size": [0.5 * i for i in range(ROWS)], "label": LABELS}
DATA = Dataset.from_dict(COLUMNS)
RAGGED = Dataset.from_dict({"ids": [[1] * (1 + i % 3) for i in range(ROWS)],
                            "label": LABELS})  # fmt: skip


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch):
        columns = [batch["ids"].float(), batch["size"][:, None]]
        return self.layer(torch.cat(columns, dim=1))


def read(dataset, label="label", classes=None, **options):
    options = ReadOptions(4, label=label, **options)
    return source_of(dataset, None, options, classes=classes)


def padded(items):
    longest = max(len(item["ids"]) for item in items)
    ids = [item["ids"] + [0] * (longest - len(item["ids"])) for item in items]
    return {"ids": np.array(ids), "labels": np.array([i["label"] for i in items])}


@pytest.mark.parametrize("format", [None, "numpy", "torch"])
def test_columns_become_a_dict_of_arrays_and_labels(format):
    x, y = read(DATA.with_format(format)).load(0)

    assert list(x) == ["ids", "size"]
    np.testing.assert_array_equal(x["ids"], IDS)
    np.testing.assert_array_equal(x["size"], COLUMNS["size"])
    assert y.tolist() == LABELS
    assert x["ids"].dtype == y.dtype == np.int64
    assert x["size"].dtype == np.float32


def test_images_are_bytes_with_channels_last_and_reach_the_model_by_their_column():
    pixels = np.arange(ROWS * 4 * 5 * 3).reshape(ROWS, 4, 5, 3).astype(np.uint8)
    columns = {"img": list(pixels), "label": LABELS}
    features = Features({"img": Image(), "label": ClassLabel(names=["ant", "bee"])})
    data = Dataset.from_dict(columns, features)

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(60, 2)

        def forward(self, img):
            return self.layer(img.flatten(1) / 255)

    trainer = daskdl.Trainer(
        Flat,
        nn.CrossEntropyLoss(),
        functools.partial(torch.optim.SGD, lr=0.1),
        client=False,
    )
    trainer.fit(data, label="label", batch_size=4, validation=data)

    assert list(trainer.classes_) == ["ant", "bee"]
    with torch.no_grad():
        expected = trainer.model_(torch.from_numpy(pixels))
    torch.testing.assert_close(
        torch.from_numpy(trainer.predict(data, label="label")), expected
    )
    assert trainer.evaluate(data, label="label")["loss"] == pytest.approx(
        nn.functional.cross_entropy(expected, torch.tensor(LABELS)).item()
    )


def test_columns_of_a_format_and_transforms_are_kept():
    few = DATA.with_format("torch", columns=["size", "label"])
    changed = DATA.with_transform(
        lambda batch: {"a": batch["size"], "b": batch["label"]}
    )

    assert list(read(few).load(0)[0]) == ["size"]
    x, y = read(changed, "b").load(0)
    assert (x["a"].tolist(), y.tolist()) == (COLUMNS["size"], LABELS)


def test_items_go_through_a_collate_function_in_their_own_format():
    source = read(dataset(RAGGED, collate_fn=padded), "labels")

    x, y = source.load(0)
    assert x["ids"].shape == (4, 3)
    assert y.tolist() == LABELS[:4]


def test_a_loader_of_it_is_taken_apart():
    sampler = SubsetRandomSampler([6, 3])
    x, y = read(DataLoader(DATA, 4, sampler=sampler)).load(0)

    assert x["ids"].tolist() == IDS[[6, 3]].tolist()
    assert y.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("feature", "labels", "classes"),
    [
        (Value("string"), NAMES, ["cat", "dog"]),
        (ClassLabel(names=["dog", "cat"]), LABELS, ["dog", "cat"]),
        (Value("int32"), LABELS, None),
    ],
    ids=["text", "ClassLabel", "numbers"],
)
def test_classes_have_the_names_in_the_column(feature, labels, classes):
    features = Features({"size": Value("float32"), "label": feature})
    data = Dataset.from_dict({"size": [1.0] * ROWS, "label": labels}, features)

    source = read(data)

    assert source.classes == classes
    names = classes or [0, 1]
    raw_labels = NAMES if classes else LABELS
    assert [names[i] for i in source.load(0)[1]] == raw_labels
    if feature == Value("string"):
        assert read(data, classes=["ant", "cat", "dog"]).load(0)[1].max() == 2


def test_a_model_is_fitted_evaluated_and_asked():
    halves = DATA.train_test_split(0.5, shuffle=False)
    trainer = daskdl.Trainer(
        Net,
        nn.CrossEntropyLoss(),
        functools.partial(torch.optim.SGD, lr=0.01),
        client=False,
    )

    trainer.fit(halves["train"], label="label", validation=halves["test"])

    assert trainer.history_[-1]["examples"] == 4
    assert trainer.evaluate(DATA, label="label")["accuracy"] >= 0
    assert trainer.predict(DATA, label="label").shape == (ROWS, 2)


@pytest.mark.parametrize(
    ("data", "label", "message"),
    [
        (DatasetDict(train=DATA, test=DATA), "label", "X is a DatasetDict with the "
         "datasets 'train', 'test'; give one of them, X.'train'., and others"),
        (DATA, None, "keys .'ids', 'size', 'label'.; say which key has the labels"),
        (DATA, "cost", "label='cost' is not a column of X, which has 'ids', 'size'"),
        (RAGGED, "label", "'ids' of X differ in length: pad them, or use daskdl.data"),
        (Dataset.from_dict({"a": NAMES, "label": LABELS}), "label",
         "column 'a' of X must hold numbers, got values such as 'dog': .*columns.'a'"),
        (Dataset.from_dict({"a": [1, 2], "label": ["a", None]}), "label",
         "column 'label' of X has missing labels; drop the rows"),
    ],
    ids=["splits", "no label", "no column", "ragged", "text", "missing"],
)  # fmt: skip
def test_what_cannot_be_used_is_told_what_to_type(data, label, message):
    with pytest.raises(daskdl.DataError, match=message):
        read(data, label)


def test_a_stream_of_it_is_a_stream():
    source = read(DATA.to_iterable_dataset())

    (rows,) = source.stream(0, ROWS)
    assert rows[0]["size"].tolist() == COLUMNS["size"]
    assert rows[1].tolist() == LABELS
