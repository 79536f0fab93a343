"""Models as bytes: written once, shared by threads, or refused by name."""

import linecache
import pickle
import sys
import threading
import traceback
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from daskdl.errors import ModelError
from daskdl.serialization import Packed, PackedModel


class Holder:
    """Something a user might hang on a module."""

    def __init__(self, held):
        self.held = held


def tied_model():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def test_views_of_one_flat_vector_are_written_once():
    model = nn.Sequential(*[nn.Linear(50, 50) for _ in range(8)])
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    start = 0
    for parameter in model.parameters():
        stop = start + parameter.numel()
        parameter.data = flat[start:stop].view_as(parameter)
        start = stop

    payload = PackedModel(model).payload

    assert payload.nbytes < 1.5 * flat.nbytes


class Remembering(nn.Module):
    def forward(self, x):
        self.seen = x
        TOGETHER.wait(30)
        return self.seen


TOGETHER = threading.Barrier(2)


def test_threads_do_not_share_attributes_of_a_model():
    packed = PackedModel(Remembering())

    with ThreadPoolExecutor(2) as threads:
        outputs = list(threads.map(lambda x: packed.module()(x), range(2)))

    assert outputs == [0, 1]


def test_threads_share_tensors_that_were_prepared_once():
    packed = pickle.loads(pickle.dumps(PackedModel(nn.Linear(1, 1))))
    together, prepared = threading.Barrier(8), []

    def prepare(module):
        prepared.append(module)
        return module.eval()

    def ask(_):
        together.wait(30)
        return packed.module(prepare)

    with ThreadPoolExecutor(8) as threads:
        modules = list(threads.map(ask, range(8)))

    assert len(prepared) == 1
    assert all(module.weight is prepared[0].weight for module in modules)
    assert not any(module.training for module in modules)


@pytest.mark.parametrize(
    ("put", "path"),
    [
        (lambda m, x: setattr(m[0], "handle", x), "model.0.handle (a _thread.lock)"),
        (lambda m, x: setattr(m, "kept", {"a": [1, x]}), "model.kept['a'][1] (a _thr"),
        (lambda m, x: setattr(m, "at", Holder(x)), "model.at.held (a _thread.lock)"),
        (lambda m, x: setattr(m, "kind", type("Own", (), {"a": x})), "model.kind (a b"),
    ],
    ids=["submodule", "containers", "object", "class"],
)
def test_unpicklable_attributes_are_named(put, path):
    model = tied_model()
    put(model, threading.Lock())

    with pytest.raises(ModelError) as caught:
        PackedModel(model)

    assert f"because {path}" in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("lose", "cause"),
    [
        (lambda module: sys.modules.pop("gone"), "No module named 'gone'"),
        (lambda module: delattr(module, "Held"), ".*attribute 'Held'"),
    ],
    ids=["module", "class"],
)
def test_code_missing_on_the_worker_is_named_with_the_remedy(lose, cause, monkeypatch):
    module = types.ModuleType("gone")
    module.Held = type("Held", (), {"__module__": "gone"})
    monkeypatch.setitem(sys.modules, "gone", module)
    packed = Packed(module.Held(), "model")
    lose(module)

    with pytest.raises(ModelError, match=rf"model cannot.*here: {cause}.*upload"):
        packed.unpack()


CELL = """\
def loss(outputs, targets):
    missing = lambda value: value.nothing  # the fault
    return missing(outputs)
"""


def test_a_traceback_shows_the_lines_of_a_notebook_in_another_process():
    lines = CELL.splitlines(keepends=True)
    linecache.cache["cell 1"] = len(CELL), None, lines, "cell 1"
    cell = {"__name__": "__main__"}
    exec(compile(CELL, "cell 1", "exec"), cell)
    packed = Packed(cell["loss"], "loss")
    del linecache.cache["cell 1"]

    with pytest.raises(AttributeError) as raised:
        packed.unpack()(1, 1)

    text = "".join(traceback.format_exception(raised.value))
    assert 'File "cell 1", line 2, in <lambda>\n    missing = lambda value' in text
    assert 'File "cell 1", line 3, in loss\n    return missing(outputs)' in text


class HalfImported:
    """Found only at the third look, as in a package that another thread imports."""

    looks = 0

    def __reduce__(self):
        return (HalfImported.restored, ())

    @staticmethod
    def restored():
        HalfImported.looks += 1
        if HalfImported.looks < 3:
            raise ImportError("cannot import 'x' from partially initialized module 'y'")
        return HalfImported.looks


def test_a_package_that_another_thread_imports_is_awaited(monkeypatch):
    monkeypatch.setattr(HalfImported, "looks", 0)

    assert Packed(HalfImported(), "X").unpack() == 3


def test_an_opened_pack_frees_its_bytes_and_cannot_be_pickled():
    packed = PackedModel(nn.Linear(100, 100))
    size = sys.getsizeof(packed)

    module = packed.opened()

    assert packed.opened() is module
    assert packed.module().weight is module.weight
    assert size > 40_000 > sys.getsizeof(packed)
    with pytest.raises(pickle.PicklingError, match="model has already been opened"):
        pickle.dumps(packed)
