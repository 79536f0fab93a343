"""Normalisers and validation: one task for each part, the same result as without."""

import os

import numpy as np
import pytest

from daskdl.data.checking.validation import validate
from daskdl.data.normalising.normalisers import Standardize
from daskdl.data.source import Source
from daskdl.data.stores.store import Store
from daskdl.errors import DataError


class Boxes(Source):
    """Parts that are made where they are loaded; one has rows that are wrong."""

    parts = 9
    lengths = None
    first = None

    def __init__(self, wrong=None):
        self.home = os.getpid()
        self.wrong = wrong

    def load(self, part):
        if os.getpid() == self.home:
            raise AssertionError("a part was loaded where the client is")
        return self.rows(part)

    def rows(self, part):
        x = np.random.default_rng(part).normal(part, 2, (part + 1, 3))
        y = np.arange(part + 1)
        if part == self.wrong:
            x[1, 2] = np.nan
        return x, y

    def name(self, part):
        return f"box {part}"


class Texts(Source):
    """Files, each with a number."""

    lengths = None
    first = None

    def __init__(self, store, names):
        self.store = store
        self.names = names
        self.parts = len(names)

    def load(self, part):
        return np.array([float(self.store.read(self.names[part]))]), None

    def file_urls(self, part):
        return [self.store.url_of(self.names[part])]

    def load_file(self, part, file):
        return self.load(part)


def test_a_normaliser_is_fitted_where_the_parts_are(client):
    fitted = Standardize().fit(Boxes(), client=client)

    X = np.concatenate([Boxes().rows(part)[0] for part in range(9)])
    np.testing.assert_allclose(fitted.scalings.shift, X.mean(0), rtol=1e-13)
    np.testing.assert_allclose(fitted.scalings.scale, X.std(0), rtol=1e-13)


def test_each_fit_gives_the_same_digits(client):
    one, two = (Standardize().fit(Boxes(), client=client) for _ in range(2))

    assert one == two


def test_nan_on_a_worker_is_refused_with_the_part(client):
    with pytest.raises(DataError, match=r"^box 7: x\[1, 2\] is nan"):
        Standardize().fit(Boxes(wrong=7), client=client)


def test_data_are_validated_where_the_parts_are(client):
    report = validate(Boxes(wrong=3), labels=8, client=client)

    assert (report.parts, report.rows) == (9, 45)
    assert report.counts["non-finite"] == report.counts["invalid label"] == 1
    assert [one[:3] for one in report.offenders] == [
        ("box 3", 1, "non-finite"),
        ("box 8", 8, "invalid label"),
    ]


def test_files_go_to_quarantine_from_the_workers(client, tmp_path):
    store = Store(str(tmp_path))
    names = [f"data/{i}" for i in range(12)]
    for i, name in enumerate(names):
        store.write(name, b"torn" if i % 5 == 0 else b"1")
    source = Texts(store, [*names, "data/missing"])

    report = validate(source, client=client, quarantine=tmp_path / "bad")

    assert store.names("bad/*") == ["bad/0", "bad/10", "bad/5"]
    assert len(store.names("data/*")) == 9
    assert report.counts["unreadable"] == 3
    assert report.counts["missing"] == 1
    assert [move.to for move in report.moved] == [
        str(tmp_path / "bad" / name) for name in ("0", "5", "10")
    ]
