"""What has to hold before a release: ``python -m tests.release [--quick]``.

`make release-check` runs it, in an environment that has only tools for packages.
Nothing is uploaded. The packages of the last commit are built and left in `dist`; their
contents, their metadata and their page on PyPI are checked; the wheel is installed
alone, and the program of the README runs there. Without ``--quick``, the long tests
follow. `build/release/report.txt` says what was run, with the closing lines, and what
is left to do.
"""

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from datetime import date
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path

from tests.support.pages import alike, code_of

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
WORK = ROOT / "build" / "release"
REPORT = WORK / "report.txt"

LONG = ("test-all", "test-oldest", "sim", "chaos")  # targets of make
CLOSING = re.compile(r"=+ .*\b(passed|failed|errors?)\b.* =+|\d+ seeds .+ processes")

URLS = ("Repository", "Documentation", "Issues", "Changelog")
FIELDS = (
    *("Name", "Version", "Summary", "Author", "License-Expression", "License-File"),
    *("Keywords", "Classifier", "Requires-Python", "Requires-Dist"),
    "Description-Content-Type",
)
NOT_IN_SDIST = {".gitignore"}
ONLY_IN_SDIST = re.compile(r"PKG-INFO|setup\.cfg|daskdl\.egg-info/.*")


class Report:
    """Lines that are printed and written to a file, and what is left to do."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left: list[str] = []

    def add(self, line: str) -> None:
        """Print a line, and write it to the file."""
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(f"{line}\n")

    def close(self) -> int:
        """Add what is left to do; return the exit code."""
        if not self.left:
            self.add("nothing is left to do before the release")
            return 0
        self.add("to do before the release:")
        for point in self.left:
            self.add(f"- {point}")
        return 1


# ---- what the files of the repository say


def disagreements(root: Path) -> Iterator[str]:
    """Yield where version, changelog, documentation and addresses disagree."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    version = project["version"]

    in_code = constant(root / "daskdl" / "config.py", "VERSION").strip('"')
    if in_code != version:
        yield f"daskdl/config.py: VERSION is {in_code}, pyproject.toml has {version}"

    newest, _, text = newest_changes(root)
    if newest != version:
        yield f"CHANGELOG.md: the newest is {newest}, pyproject.toml has {version}"

    wire = constant(root / "daskdl" / "codec" / "frame.py", "VERSION")
    if f"Wire version {wire}." not in text:
        yield f"CHANGELOG.md: {newest} does not say: Wire version {wire}."
    wire_format = (root / "docs" / "wire-format.md").read_text()
    if f"# Wire format, version {wire}\n" not in wire_format:
        yield f"docs/wire-format.md: the heading does not say: version {wire}"

    for page, number, line in lines_of_pages(root):
        for shown in re.findall(r"\bdaskdl (\d+\.\d+\.\d+)\b", line):
            if shown != version:
                yield f"{page}:{number}: daskdl {shown}, pyproject.toml has {version}"

    repository = project.get("urls", {}).get("Repository")
    shown = re.search(r"^repo_url: *(\S+)", (root / "mkdocs.yml").read_text(), re.M)
    if (shown and shown[1]) != repository:
        yield (
            f"mkdocs.yml: repo_url is {shown and shown[1]}, Repository in "
            f"pyproject.toml is {repository}"
        )


def unfinished(root: Path) -> Iterator[str]:
    """Yield what is left to fill in or to change when a version is released."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    missing = [name for name in URLS if name not in project.get("urls", {})]
    if missing:
        yield f"pyproject.toml: [project.urls] has no {', '.join(missing)}"

    newest, released, _ = newest_changes(root)
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", released):
        yield f"CHANGELOG.md: {newest} has no date, but {released!r}"

    for page, number, line in lines_of_pages(root):
        if waits := re.search(r"\b[Uu]ntil \S+ is released\b", line):
            yield f"{page}:{number}: {waits[0]}"


def constant(module: Path, name: str) -> str:
    """Return the value of a constant of a module, as it is written."""
    return re.search(rf"^{name} = (.+)$", module.read_text(), re.M)[1]


def newest_changes(root: Path) -> tuple[str, str, str]:
    """Return the newest version in the changelog, its date, and its changes."""
    text = (root / "CHANGELOG.md").read_text()
    heading = re.search(r"^## (\d\S*), (.+)$", text, re.M)
    return heading[1], heading[2], text[heading.end() :].partition("\n## ")[0]


def lines_of_pages(root: Path) -> Iterator[tuple[str, int, str]]:
    """Yield each line of the documentation, with its page and its number."""
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            yield str(page.relative_to(root)), number, line


# ---- packages


def build_packages() -> tuple[Path, Path]:
    """Build the last commit; return the source distribution and its wheel in `dist`."""
    tree = WORK / "tree"
    tree.mkdir()
    archive = WORK / "tree.tar"
    command("git", "archive", "--output", archive, "HEAD", cwd=ROOT)
    with tarfile.open(archive) as files:
        files.extractall(tree, filter="data")
    shutil.rmtree(DIST, ignore_errors=True)
    command(sys.executable, "-m", "build", "--outdir", DIST, tree, cwd=WORK)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return sdist, wheel


def missing_or_added(what: str, files: set[str], expected: set[str]) -> Iterator[str]:
    """Yield in what a package differs from the files of the repository."""
    if missing := sorted(expected - files):
        yield f"the {what} lacks {', '.join(missing)}"
    if added := sorted(files - expected):
        yield f"the {what} has, but the last commit has not, {', '.join(added)}"


def faults_of_packages(sdist: Path, wheel: Path, tracked: set[str]) -> Iterator[str]:
    """Yield what is wrong with the contents and the metadata of the packages."""
    with tarfile.open(sdist) as archive:
        paths = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    paths = {path for path in paths if not ONLY_IN_SDIST.fullmatch(path)}
    yield from missing_or_added("source distribution", paths, tracked - NOT_IN_SDIST)

    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (path,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(path))
    package = {path for path in tracked if path.startswith("daskdl/")}
    yield from missing_or_added("wheel", names, package)
    yield from faults_of_metadata(metadata)


def faults_of_metadata(metadata: Message) -> Iterator[str]:
    """Yield what PyPI would refuse, or show in a way that a reader cannot use."""
    from readme_renderer import markdown  # what PyPI itself shows pages with
    from trove_classifiers import classifiers

    if missing := [field for field in FIELDS if field not in metadata]:
        yield f"the metadata have no {', '.join(missing)}"
    unknown = sorted({*metadata.get_all("Classifier", [])} - classifiers)
    if unknown:
        yield f"PyPI does not know the classifiers {', '.join(unknown)}"

    page = Links()
    page.feed(markdown.render(metadata.get_payload()))
    if relative := sorted(link for link in page.links if not re.match(r"\w+:|#", link)):
        yield (
            f"{len(relative)} links of the README lead nowhere on PyPI, such as "
            f"{relative[0]}: setup.py completes them if [project.urls] of "
            "pyproject.toml has the Repository"
        )


class Links(HTMLParser):
    """Collects what a page links to and which pictures it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the addresses of a tag."""
        self.links |= {v for k, v in attrs if k in ("href", "src", "srcset") and v}


# ---- the wheel, alone


def faults_when_installed(wheel: Path, report: Report) -> Iterator[str]:
    """Install a wheel into an empty environment; yield what goes wrong there."""
    place = WORK / "environment"
    command(sys.executable, "-m", "venv", place)
    python = place / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    command(*pip, "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    command(*pip, "check")
    packages = command(*pip, "list", "--format=freeze").splitlines()
    size = sum(p.lstat().st_size for p in place.rglob("*") if not p.is_dir())
    report.add(f"installed alone: {len(packages)} packages, {size / 1e9:.2f} GB")
    report.add(command(place / "bin" / "daskdl", "--version").strip())

    (code,) = (code for code in code_of(ROOT / "README.md") if code.is_run)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "readme.py")
        script.write_text(code.text)
        printed = command(python, script, cwd=folder)
        where = command(
            python, "-c", "import daskdl; print(daskdl.__file__)", cwd=folder
        )
    report.add(f"the program of README.md printed:\n{printed.rstrip()}")
    if not Path(where.strip()).is_relative_to(place):
        yield f"the program of README.md used {where.strip()}"
    if code.output is None or not alike(code.output, printed):
        yield f"README.md shows another output of its program: {code.output}"


# ---- all together


def command(*arguments: str | Path, cwd: Path | str = WORK) -> str:
    """Run a command without this checkout on its path; return what it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["NO_COLOR"] = "1"
    done = subprocess.run(
        arguments,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        line = " ".join(map(str, arguments))
        sys.exit(f"{done.stdout}\n{line}: exit code {done.returncode}")
    return done.stdout


def run_target(name: str, report: Report) -> None:
    """Run a target of make, and add its closing lines."""
    log = WORK / f"{name}.log"
    report.add(f"make {name}, with all its output in {log.relative_to(ROOT)}")
    with log.open("w") as file:
        done = subprocess.run(
            ["make", "--no-print-directory", name],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    lines = log.read_text().splitlines()
    for line in [line for line in lines if CLOSING.fullmatch(line)] or lines[-1:]:
        report.add(f"    {line}")
    if done.returncode:
        report.left.append(f"make {name} failed, with exit code {done.returncode}")


def main(quick: bool) -> int:
    """Check everything; return 1 if anything is left to do."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    report = Report(REPORT)
    commit = command("git", "describe", "--always", "--tags", cwd=ROOT).strip()
    system = f"Python {platform.python_version()}, {platform.system()}"
    report.add(f"{date.today()}, commit {commit}, {system}, {os.cpu_count()} cores")

    if changed := command("git", "status", "--porcelain", cwd=ROOT).splitlines():
        report.left.append(f"not in the last commit: {', '.join(changed)}")
    report.left += [*disagreements(ROOT), *unfinished(ROOT)]
    tracked = {*command("git", "ls-files", cwd=ROOT).splitlines()}
    sdist, wheel = build_packages()
    for package in (sdist, wheel):
        report.add(f"built dist/{package.name}, {package.stat().st_size / 1e3:.0f} kB")
    twine = (sys.executable, "-m", "twine", "--no-color", "check", "--strict")
    report.add(command(*twine, sdist, wheel).strip())
    report.left += faults_of_packages(sdist, wheel, tracked)
    report.left += faults_when_installed(wheel, report)
    if not quick:
        for name in LONG:
            run_target(name, report)
    return report.close()


if __name__ == "__main__":
    sys.exit(main(quick=sys.argv[1:] == ["--quick"]))
