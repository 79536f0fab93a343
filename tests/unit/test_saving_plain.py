"""Plain values survive JSON as what they were, and nothing else is written or read."""

import json
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from daskdl import AdaptiveThreshold, Callback, OptionError, SaveError
from daskdl.saving.json_values import DEEPEST, Plain, Trust
from tests.support.problems import shown


@dataclass(frozen=True)
class Own(Callback):
    rate: float = 0.5
    kept: list = field(default_factory=list, init=False)


@dataclass
class Thawed(Callback):
    rate: float = 0.5


@dataclass(frozen=True)
class Stranger:
    rate: float = 0.5


PLAIN = Plain({"AdaptiveThreshold": AdaptiveThreshold}, (Callback,))
VALUES = [
    None,
    True,
    3,
    0.1,
    "text",
    [1, [2.5]],
    (1, (2,)),
    {"a": 1, 2: (3,)},
    {},
    float("inf"),
    -float("inf"),
    Counter({30: 1, 80: 2}),
    torch.bfloat16,
    AdaptiveThreshold(max_density=0.5),
    Own(0.25),
]


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


class TestWriting:
    @pytest.mark.parametrize("value", VALUES, ids=repr)
    def test_what_is_read_is_what_was_written(self, value):
        content = json.loads(json.dumps(PLAIN.encode(value, "x"), allow_nan=False))

        read = PLAIN.decode(content)

        assert read == value
        assert type(read) is type(value)

    def test_nan_is_read_as_nan(self):
        assert np.isnan(PLAIN.decode(PLAIN.encode(float("nan"), "x")))

    def test_a_number_of_numpy_becomes_one_of_python(self):
        assert PLAIN.encode({"x": np.float32(0.5)}, "x") == {"dict": [["x", 0.5]]}

    def test_tensors_go_beside_the_json_under_names_of_their_own(self):
        plain = Plain()
        value = {"a.b": {"c": torch.ones(2)}, "a": {"b.c": torch.zeros(1)}}

        read = Plain(tensors=plain.tensors).decode(plain.encode(value, "x"))

        assert list(plain.tensors) == ["x.a.b.c", "x.a.b.c'"]
        assert read["a.b"]["c"].tolist() == [1, 1]
        assert read["a"]["b.c"].tolist() == [0]

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (object(), "x is a builtins.object"),
            ({"a": [len]}, r"x\.a\.0 is a builtins\.builtin_function"),
            (Thawed(), "no frozen dataclass that is a Callback"),
            (Stranger(), "no frozen dataclass that is a Callback"),
            (nested(DEEPEST + 1), "nested in more than 64"),
        ],
        ids=["object", "function", "not frozen", "no base", "deep"],
    )
    def test_what_cannot_be_read_without_code_is_refused_by_name(self, value, message):
        with pytest.raises(OptionError, match=message):
            PLAIN.encode(value, "x")


class TestReading:
    def test_a_class_of_a_module_that_is_trusted_is_imported(
        self, tmp_path, monkeypatch
    ):
        (tmp_path / "my_callbacks.py").write_text(
            "from dataclasses import dataclass\n"
            "from daskdl import Callback\n"
            "@dataclass(frozen=True)\n"
            "class Mine(Callback):\n"
            "    rate: float\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        content = {"object": "my_callbacks:Mine", "fields": {"rate": 0.25}}

        with pytest.raises(OptionError, match=r"pass trusted=\['my_callbacks'\]"):
            PLAIN.decode(content)
        trusting = replace(PLAIN, trust=Trust.of(["my_callbacks"]))
        assert trusting.decode(content).rate == 0.25

    @pytest.mark.parametrize(
        "content",
        [
            {"float": "1"},
            {"tuple": 3},
            {"dict": [[1, 2, 3]]},
            {"dict": [[[], 2]]},
            {"dtype": "Tensor"},
            {"dtype": 3},
            {"tensor": "x"},
            {"code": "x"},
            {"float": "nan", "tuple": []},
            {"object": "AdaptiveThreshold", "fields": {"initial": -1}},
            {"object": "AdaptiveThreshold", "fields": {"other": 1}},
            {"object": "AdaptiveThreshold", "fields": []},
            {"object": f"{__name__}:Stranger", "fields": {}},
            {"object": f"{__name__}:Thawed", "fields": {}},
            {"object": "os:system", "fields": {}},
            nested(DEEPEST + 1),
            object(),
        ],
        ids=lambda content: shown(content)[:60],
    )
    def test_what_is_never_written_is_refused(self, content):
        with pytest.raises(SaveError):
            PLAIN.decode(content)
