"""The same 90 rows in every kind that a trainer takes.

Each maker gets a `Place`, and returns a `Given`. All values are eighths, so that none
is rounded by any file format, and the labels are sorted, as folders of images are.
"""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pandas as pd
import pyarrow as pa
import torch
import xarray
import zarr
from dask import delayed
from distributed import Client, wait
from PIL import Image
from safetensors.numpy import save_file
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from daskdl import data
from daskdl.data import batching

ROWS = 90
NAMES = list("abcd")
X = (np.random.default_rng(0).integers(0, 17, (ROWS, 4)) / 8).astype(np.float32)
Y = np.sort(np.random.default_rng(1).integers(0, 3, ROWS))
EDGES = [0, 31, 31, 60, ROWS]  # of parts; one is empty
PARTS = [slice(a, b) for a, b in itertools.pairwise(EDGES)]
CHUNKS = tuple(b - a for a, b in itertools.pairwise(EDGES))


class Where(NamedTuple):
    """What a maker may use."""

    client: Client
    folder: Path


@dataclass
class Given:
    """What a trainer is given.

    Attributes:
        x: The first argument.
        y: The second.
        options: Of `fit`, `evaluate` and `predict` alike.
        fit: Of `fit` alone.
        loss: For labels that are not one tensor.
        output_type: The type that `predict` returns.
        held: What is to stay on the cluster meanwhile.
    """

    x: Any
    y: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    loss: Callable[..., Any] = field(default_factory=nn.CrossEntropyLoss)
    output_type: type = np.ndarray
    held: Any = None


class Joining(nn.Linear):
    """Takes one input of four numbers, or several of as many together."""

    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        parts = [leaf.reshape(len(leaf), -1) for leaf in batching.leaves(x)]
        return super().forward(torch.cat([part.float() for part in parts], 1))


def of_dict(output, labels):
    return nn.functional.cross_entropy(output, labels["class"])


def eighths(batch):
    x, y = batch
    return x.float() / 8, y


def frame():
    return pd.DataFrame(X, columns=NAMES)


def series():
    return pd.Series(Y, name="label")


def arrow(where):
    return Given(pa.Table.from_pandas(frame()), pa.array(Y))


def blocks(rows=CHUNKS, labels=CHUNKS):
    return da.from_array(X, chunks=(rows, 4)), da.from_array(Y, chunks=(labels,))


def persisted(where, *collections):
    """Computed on the cluster, and there when this returns."""
    there = where.client.persist(list(collections))
    with where.client.as_current():
        wait(there, timeout=30)
    return there


def lazy(where):
    x, y = blocks()
    return Given(x.map_blocks(lambda block: block * 2) / 2, y + 0, output_type=da.Array)


def unknown(where):
    x, y = blocks()
    keep = y >= 0
    return Given(x[keep], y[keep], output_type=da.Array)


def tables():
    import dask.dataframe as dd

    whole = frame().assign(label=Y)
    return dd.from_pandas(whole, npartitions=3)


def of_tables(where, make=lambda table: table, label=lambda table: table):
    import dask.dataframe as dd

    table = make(tables())
    return Given(table[NAMES], label(table["label"]), output_type=dd.DataFrame)


def persisted_tables(where):
    return of_tables(where, lambda table: persisted(where, table)[0])


def named(column):
    """Categories whose order is that of the numbers."""
    names = pd.CategoricalDtype(["cat", "dog", "eel"])
    meta = pd.Series([], dtype=names, name=column.name)
    return column.map_partitions(
        lambda codes: pd.Series(
            pd.Categorical.from_codes(codes, dtype=names), codes.index, name=codes.name
        ),
        meta=meta,
    )


def without_pyarrow(where):
    """Strings as objects of Python, as Dask had them for long."""
    with dask.config.set({"dataframe.convert-string": False}):
        strings = lambda codes: named(codes).astype(object)  # noqa: E731 - as an argument
        return of_tables(where, label=lambda codes: _known(strings(codes)))


def _known(column):
    return column.astype(pd.CategoricalDtype(["cat", "dog", "eel"]))


def bag(where):
    pairs = [(X[i], Y[i]) for i in range(ROWS)]
    return Given(db.from_sequence(pairs, npartitions=4), output_type=db.Bag)


def part(number):
    rows = PARTS[number]
    return X[rows], Y[rows]


def list_of_delayed(where):
    return Given([delayed(part)(i) for i in range(len(PARTS))], output_type=list)


def list_of_futures(where):
    futures = [where.client.submit(part, i, pure=False) for i in range(len(PARTS))]
    return Given(futures, output_type=list)


def together(x, y):
    return x, y


def delayed_over_persisted(where):
    x, y = persisted(where, *blocks())
    pairs = zip(x.to_delayed().ravel(), y.to_delayed(), strict=True)
    # Dask keeps nothing but keys of what is persisted in the Delayed objects.
    return Given(
        [delayed(together)(*pair) for pair in pairs], output_type=list, held=(x, y)
    )


def mixed_memory(where):
    return Given((X[:, :1], (torch.from_numpy(X[:, 1:2]), frame()[["c", "d"]])), Y)


def mixed_lazy(where):
    x, y = blocks()
    return Given(
        {"a": x[:, :2], "b": {"c": x[:, 2:].rechunk(20)}}, y, output_type=da.Array
    )


def arrays_and_tables(where):
    table, columns = tables(), tables()
    x = (table[["a", "b"]].to_dask_array(), columns[["c", "d"]])
    return Given(x, table["label"].to_dask_array(), output_type=da.Array)


def dict_labels(where):
    return Given(X, {"class": Y, "weight": X[:, 0]}, loss=of_dict)


def zarr_beside_numpy(where):
    return Given(zarr.array(X, chunks=(31, 1)), Y, output_type=da.Array)


def xarray_beside_pandas(where):
    x = xarray.DataArray(blocks()[0], dims=["row", "column"])
    return Given(x, series(), output_type=da.Array)


class Items(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return X[index], int(Y[index])


def collate(items):
    xs, ys = zip(*items, strict=True)
    return np.stack(xs), np.array(ys)


def shares():
    return enumerate(PARTS[:1] + PARTS[2:])


def files(where, suffix, save):
    """One file for each part that is not empty."""
    for i, rows in shares():
        save(str(where.folder / f"{i}{suffix}"), X[rows], Y[rows])
    return str(where.folder)


def save_npz(path, x, y):
    np.savez(path, x=x, y=y)


def save_table(path, x, y):
    np.save(path, np.column_stack([x * 8, y]).astype(np.int64))


def as_frame(x, y):
    return pd.DataFrame(x, columns=NAMES).assign(label=y)


def npy(where):
    url = files(where, ".npy", save_table)
    source = data.files(url, data.Npy(label_column=-1))
    return Given(source, options={"transform": eighths})


def csv(where):
    url = files(where, ".csv", lambda path, x, y: as_frame(x, y).to_csv(path, index=0))
    return Given(data.files(url, data.Csv(label="label")))


def parquet(where):
    url = files(where, ".parquet", lambda path, x, y: as_frame(x, y).to_parquet(path))
    return Given(data.files(url, data.Parquet(label="label")))


def safetensors(where):
    return Given(
        files(where, ".safetensors", lambda p, x, y: save_file({"x": x, "y": y}, p))
    )


# On Python 3.11, two threads must not parse at a time, as np.load does with headers.
one_loads = threading.Lock()


def load(file):
    with one_loads, np.load(file) as arrays:
        return arrays["x"], torch.from_numpy(arrays["y"])


def from_files(where):
    return Given(data.files(files(where, ".npz", save_npz), load))


def several_paths(where):
    files(where, ".npz", save_npz)
    return Given(sorted(map(str, where.folder.iterdir())))


def packed_rows(where):
    url = str(where.folder / "out")
    data.pack(X, Y, url=url, per_file=16, shuffle=False, client=where.client)
    return Given(url)


def packed_blocks(where):
    url = str(where.folder / "out")
    x, y = blocks()
    data.pack(x, y, url=url, per_file=24, shuffle=False, client=where.client)
    return Given(data.files(url))


def export_first(where):
    x, y = blocks()
    return Given(x, y, fit={"approach": "export"}, output_type=da.Array)


def packed_files(where):
    (where.folder / "in").mkdir()
    inner = files(where._replace(folder=where.folder / "in"), ".npz", save_npz)
    url = str(where.folder / "out")
    data.pack(inner, url=url, per_file=2, shuffle=False, client=where.client)
    return Given(data.files(url, data.Npz()))


def images(where):
    pixels = (X * 8).astype(np.uint8).reshape(ROWS, 2, 2)
    for i, image in enumerate(pixels):
        folder = where.folder / str(Y[i])
        folder.mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / f"{i:03}.png")
    return Given(
        data.image_folder(
            str(where.folder), channels=1, scale=1 / 8, seed=None, files_per_part=20
        )
    )


def dataset_of_tensors(where):
    return Given(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)))


KINDS: dict[str, Callable[[Where], Given]] = {
    "numpy": lambda where: Given(X, Y),
    "torch": lambda where: Given(
        torch.from_numpy(X), torch.from_numpy(Y), output_type=torch.Tensor
    ),
    "pandas": lambda where: Given(frame(), series(), output_type=pd.DataFrame),
    "pyarrow": arrow,
    "dask.array": lambda where: Given(*blocks(), output_type=da.Array),
    "other chunks": lambda where: Given(*blocks(17, 40), output_type=da.Array),
    "lazy array": lazy,
    "persisted array": lambda where: Given(
        *persisted(where, *blocks()), output_type=da.Array
    ),
    "unknown chunks": unknown,
    "dask.dataframe": of_tables,
    "persisted dataframe": persisted_tables,
    "categorical label": lambda where: of_tables(where, label=named),
    "without pyarrow": without_pyarrow,
    "dask.bag": bag,
    "delayed": list_of_delayed,
    "futures": list_of_futures,
    "delayed over persisted": delayed_over_persisted,
    "tuple of kinds": mixed_memory,
    "dict of arrays": mixed_lazy,
    "arrays and tables": arrays_and_tables,
    "dict of labels": dict_labels,
    "zarr beside numpy": zarr_beside_numpy,
    "xarray beside pandas": xarray_beside_pandas,
    "TensorDataset": dataset_of_tensors,
    "Dataset": lambda where: Given(Items()),
    "collate_fn": lambda where: Given(data.dataset(Items(), collate_fn=collate)),
    ".npy": npy,
    ".npz": lambda where: Given(files(where, ".npz", save_npz)),
    ".csv": csv,
    ".parquet": parquet,
    ".safetensors": safetensors,
    "list of paths": several_paths,
    "files": from_files,
    "packed rows": packed_rows,
    "packed blocks": packed_blocks,
    "approach export": export_first,
    "packed files": packed_files,
    "images": images,
}
