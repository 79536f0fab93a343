"""Data where they are: files, packed files, images, normalizers, checks.

`Trainer.fit` also takes arrays, tables, Dask collections and torch datasets as they
are; the page on data describes them.
"""

from daskdl.data.files import files
from daskdl.data.formats import Csv, Npy, Npz, Parquet, Safetensors
from daskdl.data.images import image_folder
from daskdl.data.inputs import dataset
from daskdl.data.normalize import MinMax, Normalization, Standardize
from daskdl.data.packing import pack
from daskdl.data.source import Facts, Source
from daskdl.data.torch_datasets import Stream
from daskdl.data.validate import Report, validate

__all__ = [
    "Csv",
    "Facts",
    "MinMax",
    "Normalization",
    "Npy",
    "Npz",
    "Parquet",
    "Report",
    "Safetensors",
    "Source",
    "Standardize",
    "Stream",
    "dataset",
    "files",
    "image_folder",
    "pack",
    "validate",
]
