"""Models from JSON and from files; whatever is in them, only they are made."""

import contextlib
import gc
import io
import json
import random
import re
import zipfile

import h5py
import numpy as np
import pytest
import torch

from daskdl.errors import DaskDLError, ModelError
from daskdl.keras import from_config, from_saved
from daskdl.keras.module import KerasModule, described, library
from tests.support.keras_models import MODELS, rewritten, small

keras = library()
CIFAR = MODELS / "cifar10_keras2.json"
FUZZED = 60  # each takes about 10 ms


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "small.keras"
    small().save(path)
    return path


DENSE = {"class_name": "Dense", "config": {"name": "d", "units": 2}}
UNSHAPED = {"class_name": "Sequential", "config": {"name": "s", "layers": [DENSE]}}


class TestFromConfig:
    @pytest.mark.parametrize("form", [str, json.dumps, dict], ids=lambda f: f.__name__)
    def test_a_path_json_or_a_dict_is_accepted(self, form):
        path = MODELS / "two_by_two_keras2.json"
        value = path if form is str else json.loads(path.read_text())

        module = from_config(form(value))

        assert isinstance(module, KerasModule)
        assert module.keras.name == "two_by_two"

    @pytest.mark.parametrize("name", ["cifar10", "two_by_two"])
    def test_descriptions_of_keras_2_and_3_are_equivalent(self, name):
        two, three = (from_config(MODELS / f"{name}_keras{i}.json") for i in (2, 3))
        three.load_state_dict(two.state_dict())
        draw = torch.Generator().manual_seed(0)
        shapes = {"cifar10": [(32, 32, 3)], "two_by_two": [(4,), (3,)]}[name]
        x = tuple(torch.randn(2, *shape, generator=draw) for shape in shapes)
        x = x if len(x) > 1 else x[0]

        assert json.loads(two.to_json()) == json.loads(three.to_json())
        torch.testing.assert_close(two.eval()(x), three.eval()(x), rtol=0, atol=0)

    def test_torchs_seed_determines_the_weights(self):
        kernels = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            kernels.append(from_config(CIFAR).state_dict()["dense/kernel"])

        assert torch.equal(kernels[0], kernels[1])
        assert not torch.equal(kernels[0], kernels[2])

    def test_nested_models_of_keras_2_are_converted(self):
        module = from_config(nested_of_keras_2())
        x = torch.randn(2, 4)

        first, second = module.eval()(x)

        weights = module.state_dict()
        once = x @ weights["inner/dense/kernel"]
        torch.testing.assert_close(first, once)
        torch.testing.assert_close(second, once @ weights["inner/dense/kernel"])

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "the configuration is not valid JSON"),
            ("{}", "class_name among Functional, Model, Sequential, got None"),
            ('{"class_name": "Dense"}', "got 'Dense'"),
            ('{"class_name": "Sequential"}', "it must have a config"),
            ('{"class_name": "Sequential", "config": {}}', "KeyError: 'layers'"),
            ('{"class_name": "Sequential", "config": 3}', "it must have a config"),
            ('{"class_name": "Functional", "config": {"layers": 3}}', "TypeError"),
            (3, "path_or_json must be the path of a file"),
            (UNSHAPED, "batch_input_shape in the first layer"),
            ('{"a":' * 20_000 + "0" + "}" * 20_000, "RecursionError"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_other_json_is_refused(self, content, message):
        with pytest.raises(ModelError, match=re.escape(message)):
            from_config(content)


def node(kind, name, inbound=(), **config):
    """A layer as Keras 2.4 writes it."""
    config = {"name": name, **config}
    nodes = [[[*source, 0, {}]] for source in inbound]
    return {"class_name": kind, "config": config, "name": name, "inbound_nodes": nodes}


def nested_of_keras_2():
    """A model that applies another one twice."""
    size = {"batch_input_shape": [None, 4]}
    dense = node("Dense", "dense", [("start", 0)], units=4, use_bias=False)
    inner = {
        "layers": [node("InputLayer", "start", **size), dense],
        "input_layers": [["start", 0, 0]],
        "output_layers": [["dense", 0, 0]],
    }
    outer = {
        "layers": [
            node("InputLayer", "outer", **size),
            node("Functional", "inner", [("outer", 0), ("inner", 1)], **inner),
        ],
        "input_layers": [["outer", 0, 0]],
        "output_layers": [["inner", 1, 0], ["inner", 2, 0]],
    }
    return {"keras_version": "2.4.0", **node("Functional", "twice", **outer)}


WIDER = [keras.Input((4,)), keras.layers.Dense(5, name="last")]
ANOTHER = json.dumps(described(keras.Sequential(WIDER))).encode()


class TestFromSaved:
    def test_a_loaded_model_predicts_as_the_saved_one(self, tmp_path):
        x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
        model = small().keras
        model.compile("adam", "mse")
        model.fit(x, x[:, :3], verbose=0)
        KerasModule(model).save(tmp_path / "compiled.keras")

        module = from_saved(tmp_path / "compiled.keras")
        by_keras = keras.saving.load_model(tmp_path / "compiled.keras")

        assert not module.keras.compiled
        with torch.no_grad():
            outputs = module.eval()(torch.from_numpy(x))
        for expected in (model, by_keras):
            np.testing.assert_array_equal(outputs, expected.predict(x, verbose=0))

    @pytest.mark.parametrize(
        ("members", "message"),
        [
            ({"config.json": None}, "is not a Keras 3 file: no config.json"),
            ({"model.weights.h5": None}, "is not a Keras 3 file: no model.weights.h5"),
            ({"config.json": b"{"}, "config.json is not valid JSON"),
            ({"model.weights.h5": b"nonsense"}, "do not fit its model"),
            ({"config.json": ANOTHER}, "do not fit its model"),
            ({"é": b""}, "contains 'é' beside the model"),
            ({"assets/x": b"words"}, "contains 'assets/x' beside the model"),
            ({"../evil": b"x"}, "contains '../evil' beside the model"),
        ],
        ids=str,
    )
    def test_other_members_are_refused(self, saved, tmp_path, members, message):
        path = rewritten(saved, tmp_path / "other.keras", **members)

        with pytest.raises(ModelError, match=re.escape(message)):
            from_saved(path)

    @pytest.mark.parametrize("load", [from_config, from_saved])
    def test_a_missing_file_is_a_file_not_found_error(self, load, tmp_path):
        with pytest.raises(FileNotFoundError):
            load(tmp_path / "none.keras")
        with pytest.raises((ModelError, FileNotFoundError)):
            load(tmp_path / "none.h5")

    def test_code_in_a_file_is_not_executed(self, tmp_path):
        ran = tmp_path / "ran"
        function = f"lambda x: (__import__('pathlib').Path({str(ran)!r}).touch(), x)[1]"
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Lambda(eval(function), name="evil")]
        )
        model.save(tmp_path / "evil.keras")
        ran.unlink(missing_ok=True)  # Keras tries it out when the model is made

        with pytest.raises(ModelError, match="layer 'evil' is a Lambda"):
            from_saved(tmp_path / "evil.keras")

        assert not ran.exists()

    def test_an_oversized_description_is_not_read(self, saved, tmp_path, monkeypatch):
        monkeypatch.setattr("daskdl.keras.load.MAX_CONFIG_BYTES", 100)

        with pytest.raises(
            ModelError, match=r"config.json has \d+ bytes, but at most 100"
        ):
            from_saved(saved)


def test_changed_json_is_refused_or_harmless():
    text = (MODELS / "two_by_two_keras2.json").read_text()
    draw, refused = random.Random(0), 0
    numbers = list(re.finditer(r"\b\d+\b|null|true|false|\"[a-zA-Z_]+\"", text))

    for _ in range(FUZZED):
        value = draw.choice(numbers)
        replacement = draw.choice(
            ["null", "-1", "[]", "{}", '"x"', "1e30", '["x", 0, 0]']
        )
        damaged = text[: value.start()] + replacement + text[value.end() :]
        with contextlib.suppress(DaskDLError):
            from_config(damaged)
            continue
        refused += 1

    assert refused > FUZZED / 4


WEIGHTS = "model.weights.h5"
KERNEL = "layers/dense/vars/0"  # of shape (4, 3)


@pytest.fixture
def secret(tmp_path):
    """Twelve numbers in a file that is none of the model's, and in one of HDF5."""
    (tmp_path / "secret").write_bytes(np.arange(12, dtype="<f4").tobytes())
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["numbers"] = np.arange(12, dtype="<f4").reshape(4, 3)
    return tmp_path / "secret"


def outside(weights, secret):
    where = [(str(secret), 0, 48)]
    weights.create_dataset(KERNEL, (4, 3), "<f4", external=where)


def assembled(weights, secret):
    layout = h5py.VirtualLayout((4, 3), "<f4")
    layout[:] = h5py.VirtualSource(f"{secret}.h5", "numbers", (4, 3))
    weights.create_virtual_dataset(KERNEL, layout)


def linked(weights, secret):
    weights[KERNEL] = h5py.ExternalLink(f"{secret}.h5", "numbers")


def elsewhere(weights, secret):
    weights["numbers"] = np.zeros((4, 3), "<f4")
    weights[KERNEL] = h5py.SoftLink("/numbers")


def words(weights, secret):
    weights.create_dataset(KERNEL, data=["word"] * 3)


def round_in_circles(weights, secret):
    weights["layers/dense/vars/again"] = weights["layers"]
    endless(weights, secret)


def endless(weights, secret):
    weights.create_dataset(KERNEL, (10**15,), "<f4", chunks=(1000,))


def with_kernel(saved, target, change, secret):
    """The file, with other weights in place of the kernel."""
    with zipfile.ZipFile(saved) as archive:
        held = io.BytesIO(archive.read(WEIGHTS))
    with h5py.File(held, "r+") as weights:
        assert weights[KERNEL].shape == (4, 3)
        del weights[KERNEL]
        change(weights, secret)
    return rewritten(saved, target, **{WEIGHTS: held.getvalue()})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (outside, f"the values of '{KERNEL}' are in another file"),
        (assembled, f"the values of '{KERNEL}' are in another file"),
        (linked, f"'{KERNEL}' is a ExternalLink"),
        (elsewhere, f"'{KERNEL}' is a SoftLink"),
        (words, f"the values of '{KERNEL}' are not numbers"),
        (endless, "they would take 4000000000000012 bytes, but those of its model at "),
        (round_in_circles, "they would take 4000000000000012 bytes, but those of its "),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_weights_outside_the_file_are_refused(saved, tmp_path, secret, change, fault):
    path = with_kernel(saved, tmp_path / "other.keras", change, secret)

    with pytest.raises(ModelError, match=re.escape(f"does not write: {fault}")):
        from_saved(path)


def test_oversized_weights_are_not_unpacked(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("daskdl.keras.load.INDEX_BYTES", 2**16)
    bomb = {WEIGHTS: bytes(2**20)}
    path = rewritten(saved, tmp_path / "bomb.keras", zipfile.ZIP_DEFLATED, **bomb)

    with pytest.raises(ModelError, match=r"would take 1048576 bytes, .* at most 66016"):
        from_saved(path)


@pytest.fixture
def no_garbage_collection():
    """h5py calls Python while it has an error, where hypothesis's callback fails."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(
    ("kind", "compression"),
    [
        ("cut", zipfile.ZIP_STORED),
        ("at the ends", zipfile.ZIP_STORED),
        ("flipped", zipfile.ZIP_DEFLATED),
        ("flipped", zipfile.ZIP_BZIP2),
        ("flipped", zipfile.ZIP_LZMA),
    ],
)
def test_damage_is_a_model_error_or_harmless(saved, tmp_path, kind, compression):
    path = rewritten(saved, tmp_path / "damaged.keras", compression)
    whole, draw, refused = path.read_bytes(), random.Random(0), 0
    # What is read first, and where everything is.
    ends = [*range(600), *range(-400, 0)]

    for _ in range(FUZZED):
        data = bytearray(whole)
        if kind == "cut":
            del data[draw.randrange(len(data)) :]
        else:
            at = draw.choice(ends if kind == "at the ends" else range(len(data)))
            data[at] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with contextlib.suppress(DaskDLError):
            from_saved(path)
            continue
        refused += 1

    assert refused > FUZZED / 4
