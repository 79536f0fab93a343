"""Public data sets are read from small files in their published formats."""

import os
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import daskdl
from daskdl.data import (
    cifar10,
    fashion_mnist,
    mnist,
    movielens,
    pack_files,
    public_datasets,
    tiny_imagenet,
)
from tests.support.public_files import (
    images,
    python2_pickle,
    write_cifar10,
    write_mnist,
    write_tiny_imagenet,
)


def rows(source):
    xs, ys = zip(*map(source.load, range(source.parts)), strict=True)
    return np.concatenate(xs), np.concatenate(ys)


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "python"])
@pytest.mark.parametrize("inner", [False, True], ids=["files", "archive"])
def test_cifar10_has_the_rows_of_its_batches(binary, inner, tmp_path, monkeypatch):
    monkeypatch.setattr(public_datasets, "PART_ROWS", 8)
    name = "cifar-10-batches-bin" if binary else "cifar-10-batches-py"
    folder = tmp_path / name if inner else tmp_path
    written = write_cifar10(folder, binary=binary)
    pixels, labels = map(np.concatenate, zip(*[*written.values()][:5], strict=True))

    train = cifar10(tmp_path, scale=None, verify=False)
    test = cifar10(tmp_path, train=False, verify=False)

    assert train.lengths == [8, 8, 4] * 5
    x, y = rows(pickle.loads(pickle.dumps(train)))
    np.testing.assert_array_equal(x, pixels)
    np.testing.assert_array_equal(y, labels)
    np.testing.assert_array_equal(train.labels, labels)
    assert (x.dtype, y.dtype) == (np.uint8, np.int64)
    x, y = rows(test)
    np.testing.assert_allclose(x, written["test_batch"][0] / 255, rtol=1e-6)
    assert x.dtype == np.float32
    assert test.classes[y[9]] == "truck"
    assert train.name(1).startswith("rows 8 to 15 of ")


@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
@pytest.mark.parametrize(("function", "inner", "name"), [
    (fashion_mnist, "FashionMNIST/raw", "Ankle boot"), (mnist, "MNIST/raw", "9")
], ids=["Fashion-MNIST", "MNIST"])  # fmt: skip
def test_mnist_and_fashion_mnist_are_idx_files(function, inner, name, packed, tmp_path):
    written = write_mnist(tmp_path / inner, packed=packed)

    for train, key in ((True, "train"), (False, "t10k")):
        source = function(tmp_path, train=train, scale=None, verify=False)
        x, y = rows(source)
        np.testing.assert_array_equal(x[:, 0], written[key][0])
        np.testing.assert_array_equal(y, written[key][1])
        assert source.classes[y[9]] == name


def test_tiny_imagenet_has_its_classes_in_their_order(tmp_path):
    folder, shards = tmp_path / "tiny-imagenet-200", tmp_path / "shards"
    ids = write_tiny_imagenet(folder)
    pack_files(folder, url=shards, files_per_shard=9, client=False)

    for url in (tmp_path, folder, shards):
        train = tiny_imagenet(url, verify=False)
        val = tiny_imagenet(url, "val", verify=False)
        assert (list(train.classes), train.shape) == (ids, (3, 64, 64))
        assert np.bincount(train.labels).tolist() == [6] * 4
        x, y = rows(val)
        brightness = [x[y == label].mean() for label in range(4)]
        assert sorted(brightness) == brightness
    assert tiny_imagenet(folder, "test", verify=False).labels is None


RATINGS = "7,30,4.5,964982703\n2,10,3.0,964981247\n7,10,0.5,964982224\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ratings.csv", f"userId,movieId,rating,timestamp\n{RATINGS}"),
        ("ratings.dat", RATINGS.replace(",", "::")),
        ("u.data", RATINGS.replace(",", "\t")),
    ],
)
def test_ratings_have_the_places_of_users_and_items(name, text, tmp_path):
    (tmp_path / name).write_text(text)

    ratings = movielens(tmp_path)

    assert ratings.users[ratings.X["user"]].tolist() == [7, 2, 7]
    assert ratings.items[ratings.X["item"]].tolist() == [30, 10, 10]
    assert ratings.y.tolist() == [4.5, 3.0, 0.5]
    assert ratings.X["user"].tolist() == [1, 0, 1]
    assert ratings.y.dtype == np.float32


def test_a_fit_reads_the_files(tmp_path):
    write_cifar10(tmp_path)
    trainer = daskdl.Trainer(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        client=False,
    )

    test = cifar10(tmp_path, train=False, verify=False)
    trainer.fit(cifar10(tmp_path, verify=False), validation=test)

    assert trainer.history_[-1]["examples"] == 100
    assert trainer.classes_[0] == "airplane"


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_nothing_in_a_pickle_is_executed(protocol, tmp_path):
    write_cifar10(tmp_path, binary=False)
    attack = {"data": Attack(tmp_path / "owned"), "labels": [0]}
    path = tmp_path / "data_batch_3"
    path.write_bytes(pickle.dumps(attack, protocol))

    with pytest.raises(daskdl.DataError, match=r"cannot read .*data_batch_3: Unpickl.*"
                       r"mkdir is no array, and is not imported"):  # fmt: skip
        cifar10(tmp_path, verify=False)
    assert not (tmp_path / "owned").exists()


class Pointers:
    """Pickled as an array of objects, whose pointers are bytes of the file."""

    def __reduce__(self):
        kind = np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0)
        state = (1, (1,), Made(*kind), False, bytes(range(8)))
        return np.zeros(0).__reduce__()[0], (np.ndarray, (0,), b"b"), state


class Made:
    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


@pytest.mark.parametrize("data", [Pointers(), Made(np.ndarray, ((2**40,),))])
def test_an_array_takes_nothing_but_bytes_from_a_pickle(data, tmp_path):
    write_cifar10(tmp_path, binary=False)
    path = tmp_path / "data_batch_3"
    path.write_bytes(pickle.dumps({b"data": data, b"labels": [0]}, 4))

    with pytest.raises(daskdl.DataError, match=r"cannot read .*data_batch_3: "):
        cifar10(tmp_path, verify=False)


CIFAR, MNIST = write_cifar10, write_mnist
SHORT, LABELS = images(0, 3, (3071,)), np.array([3, 10, 5])


@pytest.mark.parametrize(
    ("read", "change", "message"),
    [
        (cifar10, lambda f: None, r"there is no .*/data_batch_1.bin, nor data_batch_1; "
         r"the folder must have the unpacked files of https://www.cs.toronto.edu"),
        (cifar10, lambda f: (CIFAR(f), (f / "data_batch_4.bin").unlink()),
         r"there is no .*/data_batch_4.bin; the folder"),
        (cifar10, CIFAR, r"data_batch_1.bin has a size of 61460 bytes, and the "
         r"published file 30730000 bytes; fetch it again, or give verify=False"),
        (cifar10, lambda f: CIFAR(f, binary=False), r"data_batch_1 has the MD5 "
         r"checksum \w{32}, and the published file c99cafc152244af753f735de768cd75f; "),
        (fashion_mnist, lambda f: None, r"there is no .*/train-images-idx3-ubyte.gz, "
         r"nor train-images-idx3-ubyte; .* https://github.com/zalandoresearch"),
        (fashion_mnist, MNIST, "published file 8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        (mnist, MNIST, "published file f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        (mnist, lambda f: MNIST(f, packed=False), "published file 47040016 bytes"),
        (tiny_imagenet, lambda f: None, r"there is no .*/wnids.txt; .* "
         r"http://cs231n.stanford.edu/tiny-imagenet-200.zip"),
        (tiny_imagenet, write_tiny_imagenet, r"train has 24 images, and the published "
         r"one 100000; fetch it again, or give verify=False"),
        (movielens, lambda f: None, r"there is no .*/ratings.csv, nor ratings.dat, nor "
         r"u.data; .* https://grouplens.org/datasets/movielens/"),
        (movielens, lambda f: (f / "u.data").write_text("1\t2\tgood\t4\n"),
         r"cannot read .*/u.data: ValueError"),
    ],
    ids=["no CIFAR", "4 of 5", "size", "checksum", "no MNIST", "Fashion-MNIST", "MNIST",
         "plain MNIST", "no TinyImageNet", "few images", "no ratings", "text"],
)  # fmt: skip
def test_missing_and_other_files_are_refused_with_what_to_do(
    read, change, message, tmp_path
):
    change(tmp_path)

    with pytest.raises(daskdl.DataError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_2.bin", bytes(3072), "cannot read .*data_batch_2.bin: ValueError"),
        ("data_batch_2.bin", b"\x0a" + bytes(3072), "each image must have one in "
         r"\[0, 10\)"),
        ("data_batch_2.bin", b"", "has 0 images and 0 labels"),
        ("data_batch_2", python2_pickle(*SHORT), "cannot read .*data_batch_2: Val"),
        ("data_batch_2", python2_pickle(images(0, 2, (3072,))[0], LABELS),
         "has 2 images and 3 labels"),
        ("data_batch_2", pickle.dumps({b"data": 1}), "cannot read .*data_batch_2: "),
        ("data_batch_2", pickle.dumps([1]), "cannot read .*data_batch_2: "),
        ("data_batch_2", b"nothing", "cannot read .*data_batch_2: "),
        ("train-labels-idx1-ubyte.gz", b"nothing", "cannot read .*train-labels"),
        ("train-labels-idx1-ubyte", bytes([0, 0, 8, 1, 0, 0, 0, 9]),
         "cannot read .*train-labels.*: it is no IDX file"),
        ("train-labels-idx1-ubyte", bytes([0, 0, 8, 1, 0, 0, 0, 1, 7]),
         "has 60 images and 1 labels"),
    ],
    ids=["short row", "class 10", "empty", "short pixels", "more labels", "no labels",
         "list", "no pickle", "no gzip", "no IDX", "fewer labels"],
)  # fmt: skip
def test_damaged_files_are_named(name, content, message, tmp_path):
    if name.startswith("data"):
        write_cifar10(tmp_path, binary=name.endswith(".bin"))
    else:
        write_mnist(tmp_path, packed=name.endswith(".gz"))
    (tmp_path / name).write_bytes(content)

    with pytest.raises(daskdl.DataError, match=message):
        (cifar10 if name.startswith("data") else mnist)(tmp_path, verify=False)
