"""Files of Keras, and what may become of them."""

import zipfile

from daskdl.keras.module import KerasModule, library

keras = library()


def small():
    """A model of one layer, whose weights are few."""
    return KerasModule(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="last")])
    )


def rewritten(path, target, compression=zipfile.ZIP_STORED, **members):
    """The file with other members; None leaves one out."""
    with (
        zipfile.ZipFile(path) as before,
        zipfile.ZipFile(target, "w", compression) as after,
    ):
        held = {name: before.read(name) for name in before.namelist()}
        for name, content in {**held, **members}.items():
            if content is not None:
                after.writestr(name, content)
    return target
