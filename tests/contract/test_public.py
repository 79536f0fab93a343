"""Public names are documented, and importing daskdl has no side effects."""

import dataclasses
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import dask.config
import pytest

import daskdl
import daskdl.data
import daskdl.keras
import daskdl.metrics
import daskdl.sklearn
from daskdl.channel import protocol
from daskdl.config import FILE
from daskdl.observe.history import COLUMNS
from daskdl.observe.tables import LAYER_COLUMNS, STEP_COLUMNS
from daskdl.observe.timeline import SPAN_COLUMNS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGES = [daskdl, daskdl.data, daskdl.keras, daskdl.metrics, daskdl.sklearn]
PUBLIC = {
    f"{package.__name__}.{name}".removeprefix("daskdl."): getattr(package, name)
    for package in PACKAGES
    for name in package.__all__
    if name != "__version__"
}

# The names that the reference documents, each with its page.
DOCUMENTED = [
    (name, path.name)
    for path in (DOCS / "api").glob("*.md")
    for name in re.findall(r"^::: daskdl\.(\S+)$", path.read_text(), re.M)
]


def first_line(value) -> str:
    """What a docstring says first; references are code."""
    line, *_ = value.__doc__.splitlines()
    line = re.sub(r":\w+:(?=`)", "", line.rstrip(".")).replace("``", "`")
    return line.replace("|", r"\|")


def table(page: str, heading: str) -> dict[str, list[str]]:
    """Rows of the first table after a heading, by their first cell in backticks."""
    text = (DOCS / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, re.MULTILINE)
    return {name: re.split(r"(?<!\\) ?\| ?", cells) for name, cells in rows}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_the_list_of_public_names_is_sorted_and_without_repeats(package):
    assert package.__all__ == sorted(set(package.__all__))


def test_the_package_has_public_names_only():
    values = {n: v for n, v in vars(daskdl).items() if not n.startswith("_")}
    public = {n for n, v in values.items() if not isinstance(v, type(sys))}

    assert public == set(daskdl.__all__) - {"__version__"}


def test_the_reference_documents_the_public_names_and_no_others():
    names = [name for name, _ in DOCUMENTED]

    assert sorted(names) == sorted([*PUBLIC, "__version__"])


def test_the_overview_of_the_reference_describes_each_public_name():
    lines = [
        f"| [`{name}`]({page}#daskdl.{name}) | {first_line(PUBLIC[name])} |"
        for name, page in DOCUMENTED
        if name in PUBLIC
    ]

    written = re.findall(r"^\| \[`.*$", (DOCS / "api" / "index.md").read_text(), re.M)

    assert sorted(written) == sorted(lines)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_its_own_docstring(name):
    value = PUBLIC[name]

    assert value.__doc__ is not None
    assert not value.__doc__.startswith(f"{value.__name__}("), (
        "that is what dataclass makes"
    )


@pytest.mark.parametrize("name", [n for n, v in PUBLIC.items() if isinstance(v, type)])
def test_every_public_method_is_documented(name):
    undocumented = [
        n
        for n, value in vars(PUBLIC[name]).items()
        if not n.startswith("_")
        and (inspect.isroutine(value) or isinstance(value, property))
        and not inspect.getdoc(getattr(PUBLIC[name], n))
    ]

    assert undocumented == []


@pytest.mark.parametrize(
    ("heading", "columns"),
    [
        ("History", COLUMNS),
        ("Steps", STEP_COLUMNS),
        ("Layers", LAYER_COLUMNS),
        ("Timeline", SPAN_COLUMNS),
    ],
)
def test_the_reference_lists_the_columns(heading, columns):
    rows = table("api/history.md", heading)

    assert {
        name: cells[0].replace("\\|", "|") for name, cells in rows.items()
    } == columns


def written(strategy):
    """A strategy as a user would write it."""
    options = {f.name: getattr(strategy, f.name) for f in dataclasses.fields(strategy)}
    usual = type(strategy)()
    changed = [f"{k}={v!r}" for k, v in options.items() if v != getattr(usual, k)]
    return f"{type(strategy).__name__}({', '.join(changed)})"


def defaults_of(fields):
    return {
        field.name: (
            repr(field.default)
            if field.default is not dataclasses.MISSING
            else written(field.default_factory())
        )
        for field in fields
    }


def arguments_of(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: repr(p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}


def fields_of(kind):
    return [f for f in dataclasses.fields(kind) if f.init]


@pytest.mark.parametrize(
    ("heading", "defaults"),
    [
        ("GradientSharing", defaults_of(fields_of(daskdl.GradientSharing))),
        ("ParameterAveraging", defaults_of(fields_of(daskdl.ParameterAveraging))),
        ("Trainer", defaults_of(f for f in fields_of(daskdl.Trainer) if f.kw_only)),
        ("Fit", arguments_of(daskdl.Trainer.fit)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_page_of_options_lists_all_options_with_their_defaults(heading, defaults):
    rows = table("options.md", heading)

    assert {name: cells[0].strip("`") for name, cells in rows.items()} == defaults


@pytest.mark.parametrize(
    ("method", "heading"), [("evaluate", "Evaluate"), ("predict", "Predict")]
)
def test_the_page_of_options_says_which_options_other_methods_have(method, heading):
    rows = table("options.md", "Fit")

    also = {name for name, cells in rows.items() if f"`{method}`" in cells[-1]}
    options = table("options.md", heading)
    defaults = {name: cells[0].strip("`") for name, cells in options.items()}
    arguments = arguments_of(getattr(daskdl.Trainer, method))
    assert also | set(options) == set(arguments)
    assert defaults.items() <= arguments.items()


def test_functions_have_the_arguments_of_methods():
    place = {"client": "None", "device": "'auto'"}
    for function, method, extra in (
        (daskdl.predict, daskdl.Trainer.predict, place),
        (daskdl.evaluate, daskdl.Trainer.evaluate, place | {"loss": "None"}),
        (daskdl.Predictor, daskdl.Trainer.predictor, place),
    ):
        assert arguments_of(function) == arguments_of(method) | extra


def test_the_page_on_inference_lists_the_options_of_a_predictor():
    rows = table("inference.md", "Serving")

    defaults = {name: cells[0].strip("`") for name, cells in rows.items()}
    assert defaults == arguments_of(daskdl.Trainer.predictor)


def test_the_page_of_options_lists_the_configuration():
    (file,) = dask.config.collect_yaml([str(FILE)])
    configuration = file["daskdl"]
    timeouts = {
        f"daskdl.timeouts.{name}": re.sub(r"(?<=\d)s$", " s", value)
        for name, value in configuration["timeouts"].items()
    }
    folders = {f"daskdl.export.{name}": "null" for name in configuration["export"]}

    listed = [table("options.md", h) for h in ("Timeouts", "Temporary packed files")]

    assert configuration.keys() == {"timeouts", "export"}
    assert {*configuration["export"].values()} == {None}
    assert [{n: c[0].strip("`") for n, c in rows.items()} for rows in listed] == [
        timeouts,
        folders,
    ]


def test_the_page_on_tuning_lists_every_cause_of_waiting():
    assert set(table("tuning.md", "Waiting")) == set(protocol.WaitCause)


IMPORT = """
import ast, importlib, os, pathlib, sys, threading

root = pathlib.Path(sys.argv[1])
absent = "pandas.", "keras.", "dask_jobqueue.", "bokeh.", "prometheus_client."
absent += "sklearn.", "triton."
# As the test below finds, these are not imported.
absent += "torch.", "torchmetrics.", "numba.", "distributed.", "safetensors.torch."
# Imported before anything is watched: dependencies may do what they like.
for path in root.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            if not f"{name}.".startswith(("daskdl.", *absent)):
                importlib.import_module(name)

import dask.config

reads = []
kind = type(os.environ)

def watched(method):
    def read(self, *arguments):
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith("<frozen "):  # of os
            frame = frame.f_back
        if pathlib.Path(frame.f_code.co_filename).is_relative_to(root):
            reads.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return method(self, *arguments)
    return read

kind.__getitem__ = watched(kind.__getitem__)
kind.__iter__ = watched(kind.__iter__)
defaults, *_ = dask.config.collect_yaml([str(root / "daskdl.yaml")])
expected = repr(dask.config.merge(dask.config.config, defaults))
threads = threading.active_count()

import daskdl

assert pathlib.Path(daskdl.__file__).parent == root, daskdl.__file__
assert reads == [], f"read the environment: {reads}"
assert threading.active_count() == threads, threading.enumerate()
assert repr(dask.config.config) == expected, "more than the defaults was added"
print("nothing but names")
"""


def test_import_starts_no_thread_reads_no_environment_and_adds_its_defaults():
    package = Path(daskdl.__file__).parent

    done = subprocess.run(
        [sys.executable, "-c", IMPORT, str(package)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=package.parent,
    )

    assert (done.stdout, done.stderr) == ("nothing but names\n", "")


FEW = {"torchmetrics", "matplotlib", "pandas", "pyarrow", "keras", "PIL", "dask.array"}
FEW |= {"sklearn"}
# Packages that must not be loaded, for their time and memory; by what is imported, one
# after the other.
NOT_FOR = {
    "daskdl": {"torch", "numba", "distributed", *FEW},
    "daskdl.channel.scheduler": {"torch", *FEW},
    "daskdl.training.dask_backend": FEW,  # a worker
    "daskdl.Trainer": FEW,  # a client
}


def test_packages_that_few_users_need_are_not_imported():
    asked = "import sys, daskdl"
    for name, packages in NOT_FOR.items():
        asked += f"\nimport {name.removesuffix('.Trainer')}; {name}"
        asked += f"\nprint({name!r}, sorted({packages!r} & sys.modules.keys()))"

    done = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, timeout=100
    )

    assert done.stdout.splitlines() == [f"{name} []" for name in NOT_FOR]
    assert done.stderr == ""


def test_files_other_than_code_are_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = Path(daskdl.__file__).parent
    files = [p.relative_to(package) for p in package.rglob("*") if p.is_file()]

    others = {
        str(p) for p in files if p.suffix != ".py" and p.parent.name != "__pycache__"
    }

    listed = project["tool"]["setuptools"]["package-data"]["daskdl"]
    assert others == set(listed)
