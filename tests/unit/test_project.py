"""The project's own files agree with one another."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from nbdist._version import __version__

ROOT = Path(__file__).parents[2]
CONDA_NAMES = {"pytorch": "torch"}
MAX_FILE_BYTES = 500_000
CONTRACT_TARGETS = """
demo test lab setup lint types imports sizes test-unit test-engines test-faults test-notebooks
test-ui test-hosts test-gpu notebooks ext docs bench soak build ci clean
"""


@cache
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements(*extras: str) -> dict[str, SpecifierSet]:
    """The bounds of the dependencies and of these extras, by canonical name."""
    project = pyproject()["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): r.specifier for r in parsed if r.name != "nbdist"}


@cache
def pins() -> dict[str, str]:
    """The exact versions of constraints.txt, by canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@cache
def project_files() -> list[Path]:
    """Every file of the project that git knows or would add; never empty."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, to tell the project's files from others")
    command = [git, "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in out.split("\0") if name]
    assert files
    return [path for path in files if path.is_file()]


@cache
def project_texts() -> dict[str, str]:
    """The text of every project file that is text, by its path in the project."""
    raw = {str(path.relative_to(ROOT)): path.read_bytes() for path in project_files()}
    return {name: data.decode() for name, data in raw.items() if b"\0" not in data}


def make_targets() -> dict[str, str]:
    """What `make` alone lists: target and description."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")
    out = subprocess.run([make], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"^  make ([a-z-]+) +(\S.*)$", out, flags=re.MULTILINE))


def test_environment_yml_names_the_same_packages_and_bounds():
    """environment.yml and pyproject.toml agree on every package of the runtime and the tests."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    found = {}
    for line in environment["dependencies"]:
        name, _, bounds = line.partition(" ")
        found[canonicalize_name(CONDA_NAMES.get(name, name))] = SpecifierSet(bounds)
    assert found.pop("pip") == SpecifierSet()
    assert found.pop("python") == SpecifierSet(pyproject()["project"]["requires-python"])
    assert found == requirements("test")


@pytest.mark.parametrize("extra", ["test", "gpu", "dev"])
def test_constraints_pin_every_dependency_within_its_bounds(extra):
    """Each dependency has one exact version in constraints.txt, and the bounds admit it."""
    for name, bounds in requirements(extra).items():
        assert name in pins(), f"{name} has no line in constraints.txt"
        assert bounds.contains(pins()[name]), f"{name}=={pins()[name]} is not within {bounds}"


def test_constraints_hold_plain_pins_only():
    """constraints.txt has no option, path, address or local version, and pins the right torch."""
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line
    assert pins()["torch"] == "2.13.0"
    assert "nbdist" not in pins()


def test_make_lists_every_target_of_the_contract_with_one_line():
    """`make` alone lists all targets that users are promised, each with a description."""
    assert make_targets().keys() >= set(CONTRACT_TARGETS.split())


def test_make_lists_every_target_that_it_has():
    """No target is hidden: what is declared phony is listed, and the reverse."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert set(phony.split()) == make_targets().keys()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_installs_once(tmp_path, target):
    """The first call of a target installs, the second does not, and one after a change of what is
    to be installed does again."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    def recipe():
        command = ["make", "--dry-run", target]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    first = recipe()
    assert "pip install" in first
    (stamp,) = set(re.findall(r"^touch (\S+)$", first, flags=re.MULTILINE))
    (tmp_path / stamp).parent.mkdir()
    (tmp_path / stamp).touch()
    assert "pip install" not in recipe()
    with (tmp_path / "constraints.txt").open("a") as constraints:
        constraints.write("another==1.0\n")
    assert "pip install" in recipe()


def test_ci_run_calls_make_ci_and_nothing_else():
    """CI runs what everybody can run."""
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    lines = [line for line in script.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert [
        line for line in lines if line.split()[0] not in {"#", "set", "cd", "#!/usr/bin/env"}
    ] == ["exec make ci"]


def test_the_version_stands_in_one_place():
    """pyproject.toml reads the version from nbdist/_version.py, and nothing repeats it."""
    assert "version" not in pyproject()["project"]
    assert pyproject()["project"]["dynamic"] == ["version"]
    assert pyproject()["tool"]["hatch"]["version"]["path"] == "nbdist/_version.py"
    repeated = re.compile(rf"""["']{re.escape(__version__)}["']""")
    places = [name for name, text in project_texts().items() if repeated.search(text)]
    manifests = [name for name in places if name.endswith("package.json")]
    assert sorted(set(places) - set(manifests)) == ["nbdist/_version.py"]


def test_package_json_files_carry_the_same_version():
    """Every package.json of ours has the version of the Python package (in npm's spelling)."""
    for name, text in project_texts().items():
        if name.endswith("package.json"):
            npm = re.sub(r"\.dev(\d+)$", r"-dev.\1", __version__)
            assert json.loads(text)["version"] in {npm, __version__}, name


def test_lock_files_of_node_name_no_address():
    """Whichever registry is set up serves what they pin; each package is told by its digest."""
    locks = {
        n: json.loads(t) for n, t in project_texts().items() if n.endswith("package-lock.json")
    }
    assert locks
    for name, lock in locks.items():
        packages = {where: told for where, told in lock["packages"].items() if where}
        assert packages
        assert all(told["integrity"] for told in packages.values()), name
        assert '"resolved"' not in project_texts()[name], name


def test_pre_commit_hooks_are_local():
    """No hook needs the network: all are local and run what .venv holds."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    for hook in config["repos"][0]["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"].startswith(".venv/bin/")


def test_every_text_ends_with_one_newline_at_its_end_of_file():
    """Every text file that is not empty ends with exactly one newline."""
    texts = {name: text for name, text in project_texts().items() if text}
    assert [
        n for n, text in texts.items() if not text.endswith("\n") or text.endswith("\n\n")
    ] == []


def test_no_file_is_large():
    """No file of the project is over 500 kB."""
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in project_files()}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_BYTES} == {}


@pytest.mark.parametrize("word", ["/wor" + "k/", "share" + "d/"])
def test_no_file_names_a_folder_of_the_place_it_was_written_in(word):
    """The project knows nothing of the machine on which it is developed."""
    assert [name for name, text in project_texts().items() if word in text] == []
