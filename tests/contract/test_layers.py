"""The layers of the package, and the libraries that each package may import."""

import ast
import graphlib
import re
import sys
from pathlib import Path

import pytest

import daskdl

ROOT = Path(daskdl.__file__).parent
PATHS = sorted(ROOT.rglob("*.py"))

# A package may import packages of earlier lines only. Within a package, imports must
# not form a circle.
LAYERS = [
    {"errors"},
    {"config", "serialization", "process_settings", "objective", "codec", "observe"},
    {"util", "losses", "compression"},
    {"callbacks", "data", "channel"},
    {"keras", "inference"},
    {"saving", "evaluation"},
    {"metrics", "training"},
    {"trainer", "planning"},
    {"public", "sklearn"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

OUTSIDE = {
    "errors": set(),
    "codec": {"lz4", "numba", "numpy", "typing_extensions"},
    "config": {"dask"},
    "objective": {"torch"},
    "losses": {"torch"},
    "serialization": {"cloudpickle", "numpy", "torch", "typing_extensions"},
    "util": {"dask", "distributed", "numpy", "torch"},
    "process_settings": {"torch"},
    "observe": {"matplotlib", "numpy", "pandas", "typing_extensions"},
    "callbacks": {"dask", "torch", "tqdm", "typing_extensions"},
    "compression": {
        "llvmlite",
        "numba",
        "numpy",
        "torch",
        "triton",
        "typing_extensions",
    },
    "channel": {
        "dask",
        "distributed",
        "msgspec",
        "numpy",
        "prometheus_client",
        "tornado",
        "typing_extensions",
    },
    "data": {
        "PIL",
        "dask",
        "distributed",
        "fsspec",
        "numpy",
        "pandas",
        "pyarrow",
        "safetensors",
        "torch",
        "typing_extensions",
    },
    "keras": {"h5py", "keras", "torch", "typing_extensions"},
    "inference": {
        "dask",
        "distributed",
        "numpy",
        "pandas",
        "torch",
        "typing_extensions",
    },
    "saving": {"numpy", "safetensors", "torch", "typing_extensions"},
    "evaluation": {
        "dask",
        "distributed",
        "matplotlib",
        "numpy",
        "pandas",
        "torch",
        "torchmetrics",
        "typing_extensions",
    },
    "metrics": set(),
    "training": {
        "dask",
        "distributed",
        "numpy",
        "torch",
        "tqdm",
        "typing_extensions",
    },
    "trainer": {"distributed", "torch"},
    "sklearn": {"distributed", "numpy", "sklearn", "torch"},
    "planning": {
        "dask",
        "distributed",
        "numpy",
        "pandas",
        "torch",
        "typing_extensions",
    },
    "public": set(),
    "__init__": set(),
    "cli": {
        "click",
        "cloudpickle",
        "dask",
        "dask_jobqueue",
        "distributed",
        "torch",
        "typing_extensions",
    },
    "__main__": set(),
}

# Private modules of other libraries, which have no public counterpart.
PRIVATE = {
    "dask._task_spec",  # tasks of a graph, and their execution without a scheduler
    "distributed.shuffle._core",  # peer-to-peer shuffles without a dataframe
    "distributed.shuffle._shuffle",
    "torch.utils._python_dispatch",  # observes all operations of a loss
    "torch.utils.data._utils",  # sets `get_worker_info`, and collates
}

# All other modules run, and are tested, without a cluster.
DISTRIBUTED = {
    "channel.dashboard",
    "channel.protocol",  # Dask's wrappers, so that it does not touch the bytes
    "channel.scheduler",
    "channel.transport",  # requests to other servers
    "channel.worker",
    "cli",
    "data.dask_collections",  # peer-to-peer shuffles
    "data.distribute",
    "data.inputs",
    "evaluation.evaluate",
    "evaluation.per_example",
    "inference.lazy",
    "inference.pool",
    "inference.predict",
    "inference.predictor",
    "planning.measure",
    "sklearn",
    "trainer",
    "training.dask_backend",
    "training.fit",
    "util",
}


def name_of(path: Path) -> str:
    """The dotted name below the package; for `__init__`, that of its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[1:] and parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """All imports of a file, also inside functions, as full dotted names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def of_this_package(names: set[str]) -> set[str]:
    """Names of this package, without its name."""
    return {n.removeprefix("daskdl.") for n in names if n.startswith("daskdl.")}


FILES = {name_of(path): imported(path) for path in PATHS}


def package_of(name: str) -> str:
    """The name in `LAYERS` that a dotted name belongs to."""
    return name.split(".")[0]


def files_of(name: str) -> list[str]:
    """The file an imported name is, or is in: `codec.gaps.RICE` is in `codec.gaps`."""
    parts = name.split(".")
    longer = [".".join(parts[:i]) for i in range(len(parts), 0, -1)]
    return [n for n in longer if n in FILES][:1]


def test_every_package_has_a_layer_and_a_list_of_libraries():
    packages = {package_of(name) for name in FILES}

    assert packages == set(LEVEL) == set(OUTSIDE)


@pytest.mark.parametrize("name", FILES)
def test_imports_point_down(name):
    package = package_of(name)
    others = {package_of(n) for n in of_this_package(FILES[name])} - {package}

    upward = {
        imported_package
        for imported_package in others
        if LEVEL[imported_package] >= LEVEL[package]
    }

    assert not upward, f"{name} must not import {upward}"


def test_files_do_not_import_in_a_circle():
    graph = {
        name: {file for n in of_this_package(names) for file in files_of(n)} - {name}
        for name, names in FILES.items()
    }

    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises on one

    assert set(order) == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_each_part_imports_listed_packages_only(name):
    outside = {n.split(".")[0] for n in FILES[name]} - set(sys.stdlib_module_names)

    more = outside - {"daskdl"} - OUTSIDE[name.split(".")[0]]

    assert not more, f"{name} must not import {more}"


def test_every_listed_package_is_imported():
    used = {part: set() for part in OUTSIDE}
    for name, names in FILES.items():
        used[name.split(".")[0]] |= {n.split(".")[0] for n in names}

    assert {
        part: OUTSIDE[part] - used[part]
        for part in OUTSIDE
        if OUTSIDE[part] - used[part]
    } == {}


def test_listed_private_modules_only_are_imported():
    private = {
        match[0]
        for names in FILES.values()
        for name in names
        if not name.startswith("daskdl.")
        and (match := re.match(r".+?\._[a-z]\w*", name))
    }

    assert private == PRIVATE


def test_distributed_is_imported_by_listed_modules_only():
    users = {
        n
        for n, names in FILES.items()
        if any(i.split(".")[0] == "distributed" for i in names)
    }

    assert users == DISTRIBUTED
