"""Data where they are: files, batch files, images, normalizers, checks.

What `Trainer.fit` takes without any of these, arrays, tables, Dask's collections and
datasets of torch, is on the page on data.
"""

from daskdl.data.batch_files import BatchFiles, Manifest
from daskdl.data.export import export
from daskdl.data.files import Files
from daskdl.data.formats import FromBytes, Npy, Npz, OneExample, Safetensors
from daskdl.data.images import image_folder
from daskdl.data.normalize import (
    MinMax,
    Normalization,
    Standardize,
)
from daskdl.data.shards import Shards, file_batches
from daskdl.data.source import Facts, Source
from daskdl.data.tabular_formats import Csv, Parquet
from daskdl.data.torch_datasets import Stream
from daskdl.data.validate import Report, validate

__all__ = [
    "BatchFiles",
    "Csv",
    "Facts",
    "Files",
    "FromBytes",
    "Manifest",
    "MinMax",
    "Normalization",
    "Npy",
    "Npz",
    "OneExample",
    "Parquet",
    "Report",
    "Safetensors",
    "Shards",
    "Source",
    "Standardize",
    "Stream",
    "export",
    "file_batches",
    "image_folder",
    "validate",
]
