"""Findings about what is installed: packages, the build of torch, and whether it fits the GPUs.

Torch is imported in a process of its own, so that the command line stays light.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from nbdist.cli.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from nbdist.gpus import Gpus

_TORCH_TIMEOUT_S = 120.0
_SHOWN_PACKAGES = ("ipykernel", "ipyparallel", "jupyterlab")

_ASK_TORCH = """
import json
import torch
import torch.distributed as dist
available = dist.is_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "gloo": available and dist.is_gloo_available(),
    "nccl": available and dist.is_nccl_available(),
}))
"""


def packages(name: str = "nbdist") -> Iterator[Finding]:
    """Whether Python and what is installed are within the bounds of the installed metadata."""
    try:
        about = metadata.metadata(name)
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        yield Finding(
            name="packages",
            level="warn",
            text=f"{name} is not installed, so there are no bounds to compare with",
            next_step="install it: pip install -e .",
        )
        return
    bounds = str(about["Requires-Python"] or "")
    if not SpecifierSet(bounds).contains(platform.python_version(), prereleases=True):
        yield Finding(
            name="python",
            level="fail",
            text=f"{platform.python_version()} is not within {bounds}",
            next_step=f"make an environment with Python {bounds}",
        )
    required = [Requirement(line) for line in lines]
    required = [r for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    yield from package_versions(required, {r.name: installed_version(r.name) for r in required})


def package_versions(
    required: Iterable[Requirement], installed: Mapping[str, str | None]
) -> Iterator[Finding]:
    """One finding for each package that is missing or out of bounds, or one for all of them."""
    is_fine = True
    for requirement in required:
        version = installed[requirement.name]
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            continue
        is_fine = False
        yield Finding(
            name="packages",
            level="fail" if version is None else "warn",
            text=f"{requirement.name} is not installed"
            if version is None
            else f"{requirement.name} {version} is not within {requirement.specifier}",
            next_step=f'pip install "{requirement.name}{requirement.specifier}"',
        )
    if is_fine:
        shown = ", ".join(f"{n} {installed[n]}" for n in _SHOWN_PACKAGES if n in installed)
        text = f"all {len(installed)} within their bounds: {shown}"
        yield Finding(name="packages", level="ok", text=text)


def installed_version(package: str) -> str | None:
    """The installed version; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """What torch says of itself; or why it cannot be imported."""

    version: str = ""
    cuda: str | None = None
    """CUDA version it was built with; None: built without."""
    gloo: bool = False
    nccl: bool = False
    import_s: float = 0.0
    problem: str = ""


def ask_torch(code: str = _ASK_TORCH, *, timeout_s: float = _TORCH_TIMEOUT_S) -> TorchBuild:
    """Import torch in a process of its own, so that the command line stays light."""
    started = time.monotonic()
    try:
        process = subprocess.run(  # noqa: S603 - our own interpreter and code, no shell
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TorchBuild(problem=f"importing it took longer than {timeout_s:.0f} s")
    import_s = time.monotonic() - started
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        return TorchBuild(problem=lines[-1])
    return TorchBuild(import_s=import_s, **json.loads(process.stdout.splitlines()[-1]))


def torch_build(build: TorchBuild) -> Finding:
    """Whether torch can be imported and form groups."""
    if build.problem:
        step = "install torch for this machine: see pytorch.org/get-started"
        return Finding(name="torch", level="fail", text=build.problem, next_step=step)
    text = (
        f"{build.version}, {f'CUDA {build.cuda}' if build.cuda else 'without CUDA'}, "
        f"imported in {build.import_s:.1f} s"
    )
    if not build.gloo:
        step = "install a build of torch that has torch.distributed with gloo"
        return Finding(name="torch", level="fail", text=f"{text}; without gloo", next_step=step)
    return Finding(name="torch", level="ok", text=text)


def gpu_finding(gpus: Gpus, build: TorchBuild) -> Finding:
    """GPUs, and whether this build of torch can use them."""
    if not gpus.count:
        step = "pip install 'nbdist[gpu]'" if "not installed" in gpus.reason else ""
        text = f"none ({gpus.reason}): engines run on the CPU"
        return Finding(name="gpus", level="warn" if step else "ok", text=text, next_step=step)
    text = f"{gpus.count}"
    if build.problem or (build.cuda and build.nccl):
        return Finding(name="gpus", level="ok", text=text)
    lack = "NCCL" if build.cuda else "CUDA"
    return Finding(
        name="gpus",
        level="warn",
        text=f"{text}, but this build of torch is without {lack}",
        next_step=f"install a build of torch with {lack}: see pytorch.org/get-started",
    )
