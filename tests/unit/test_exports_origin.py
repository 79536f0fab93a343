"""The same data are told to be the same in another session, other data are not."""

import subprocess
import sys

import dask.array as da
import numpy as np
import pytest
import torch
from dask import delayed

from daskdl.data.export import differences, origin_of, token_of
from tests.support.numbered import Numbered

VALUES = {
    "numpy": "np.arange(5)",
    "torch": "torch.arange(5)",
    "tree": "({'a': torch.ones(3)}, [np.ones(2)])",
    "dask": "da.from_array(np.arange(5), chunks=2)",
    "paths": "['s3://bucket/a.csv', 'b.csv']",
    "delayed": "[delayed(max)(1, 2), delayed(min)(1, 2)]",
}


@pytest.fixture(scope="module")
def elsewhere():
    """The tokens of the same values in another process."""
    script = (
        "import dask.array as da, numpy as np, torch; from dask import delayed\n"
        "from daskdl.data.export import token_of\n"
        f"for value in {list(VALUES.values())!r}: print(token_of(eval(value)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True
    )
    return dict(zip(VALUES, done.stdout.decode().split(), strict=True))


@pytest.mark.parametrize("kind", VALUES)
def test_a_token_is_the_same_in_another_session(kind, elsewhere):
    names = {"np": np, "torch": torch, "da": da, "delayed": delayed}

    assert elsewhere[kind] == token_of(eval(VALUES[kind], names))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.arange(5), np.arange(5) + 1),
        (torch.arange(5), torch.arange(5) + 1),
        (da.zeros(5), da.ones(5)),
        (["a.csv"], ["b.csv"]),
    ],
    ids=["numpy", "torch", "dask", "paths"],
)
def test_other_data_have_another_token(one, other):
    assert token_of(one) != token_of(other)


def test_the_origin_has_data_and_options():
    origin = origin_of(Numbered([3, 4]), np.zeros(2), {"seed": 3})

    assert origin == {
        "data": token_of(np.zeros(2)),
        "parts": 2,
        "rows": 7,
        "seed": 3,
    }


def test_differences_are_named():
    assert differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5}) == (
        "b was 2 and is 5, c was 3 and is None"
    )
    assert differences({"a": 1}, {"a": 1}) == ""
