"""The runtime directory of one cluster: where its files are, who may read them, and its lease.

Used by the kernel, the supervisor and every process below it. Layout, all of it 0700 or 0600:

    <root>/<cluster id>/
        cluster.json     who owns it, and the CURVE keys; whoever can read it is in
        surroundings.json   environment, sys.path and folder of the kernel at the start
        lease            its modification stamp is changed by the supervisor while it lives
        orders           socket on which kernel and agents reach the supervisor
        zygote           socket on which the supervisor reaches the zygote
        ledger, journal  what a replaced supervisor takes up again
        controller       which process the ipyparallel controller is
        ipp/             profile of the ipyparallel controller, with its connection files
        logs/            one file per process, `slot-0.log` … for the engines

Sockets in it are Unix sockets, whose path may hold 107 bytes at most (unix(7)); a root that is too
long is passed over.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import zmq

from nbdist.config import ClusterConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_SOCKET_PATH = 107
_LONGEST_NAME = "/0123abcd/orders"


@dataclass(frozen=True, kw_only=True)
class Keys:
    """CURVE keys (Z85 text): the supervisor's pair, and the pair that its clients share."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def make(cls) -> Keys:
        """Fresh keys."""
        (server_public, server_secret), (client_public, client_secret) = (
            zmq.curve_keypair(),
            zmq.curve_keypair(),
        )
        return cls(
            server_public=server_public.decode(),
            server_secret=server_secret.decode(),
            client_public=client_public.decode(),
            client_secret=client_secret.decode(),
        )


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process, named so that a reused pid is not taken for it."""

    pid: int
    created: float
    """Creation time as psutil gives it."""

    @classmethod
    def this(cls) -> Owner:
        """The calling process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Owner:
        """Process `pid`; raises psutil.NoSuchProcess where there is none."""
        return cls(pid=pid, created=psutil.Process(pid).create_time())

    def is_alive(self) -> bool:
        """Whether that very process runs (a zombie does not)."""
        try:
            process = psutil.Process(self.pid)
            return (
                abs(process.create_time() - self.created) < 1.0
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What engines, newcomers too, share with the notebook: as it was when it started them."""

    cwd: str
    path: tuple[str, ...]
    """sys.path."""
    env: dict[str, str]

    @classmethod
    def here(cls) -> Surroundings:
        """The calling process's."""
        env = dict(os.environ)
        env.pop("PYTEST_CURRENT_TEST", None)  # ipykernel would not capture what native code prints
        return cls(cwd=str(Path.cwd()), path=tuple(map(str, sys.path)), env=env)

    def enter(self, extra: Mapping[str, str]) -> None:
        """Take them on, with `extra` variables."""
        os.environ.clear()
        os.environ.update({**self.env, **extra})
        sys.path[:] = self.path
        os.chdir(self.cwd)


def log_mark(pid: int) -> str:
    """With this line the part of a process in its slot's log begins; others were there before."""
    return f"---- process {pid} ----"


@dataclass(frozen=True)
class RunDir:
    """One cluster's directory."""

    path: Path

    @property
    def cluster_id(self) -> str:
        """The cluster's name: its directory's."""
        return self.path.name

    def file(self, name: str) -> Path:
        """Path of one of the files above."""
        return self.path / name

    def log(self, name: str) -> Path:
        """Path of the log of `name`, for instance `slot-0`."""
        return self.path / "logs" / f"{name}.log"

    @property
    def endpoint(self) -> str:
        """Where the supervisor is reached."""
        return f"ipc://{self.file('orders')}"

    def connection_file(self, role: str) -> Path:
        """ipyparallel's connection file for "engine" or "client"."""
        return self.path / "ipp" / "security" / f"ipcontroller-{role}.json"

    @property
    def is_controller_ready(self) -> bool:
        """Whether the controller has written its connection files, whole."""
        try:
            for role in ("client", "engine"):
                json.loads(self.connection_file(role).read_text())
        except (OSError, ValueError):
            return False
        return True

    @classmethod
    def create(cls, config: ClusterConfig, owner: Owner) -> RunDir:
        """Make the directory of a new cluster, its keys in it."""
        path = runtime_root() / secrets.token_hex(4)
        path.mkdir(mode=0o700)
        self = cls(path)
        try:
            self._fill(config, owner)
        except BaseException:
            self.remove()
            raise
        return self

    def _fill(self, config: ClusterConfig, owner: Owner) -> None:
        (self.path / "logs").mkdir(mode=0o700)
        self.renew_lease()
        content = {"config": asdict(config), "owner": asdict(owner), "keys": asdict(Keys.make())}
        self._write_private("surroundings.json", json.dumps(asdict(Surroundings.here())))
        self._write_private("cluster.json", json.dumps(content))

    def read_surroundings(self) -> Surroundings:
        """What the kernel had around it at the start."""
        content = json.loads(self.file("surroundings.json").read_text())
        return Surroundings(cwd=content["cwd"], path=tuple(content["path"]), env=content["env"])

    def read(self) -> tuple[ClusterConfig, Owner, Keys]:
        """Settings, owner and keys; OSError or ValueError if the file is missing or cut short."""
        content = json.loads(self.file("cluster.json").read_text())
        try:
            config = ClusterConfig.from_mapping(content["config"])
            return config, Owner(**content["owner"]), Keys(**content["keys"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.file('cluster.json')} is not whole: {error!r}") from error

    def write_owner(self, name: str, owner: Owner) -> None:
        """Note a process under a name, for instance `controller`."""
        self.file(name).unlink(missing_ok=True)
        self._write_private(name, json.dumps(asdict(owner)))

    def read_owner(self, name: str) -> Owner | None:
        """The process noted under a name, or None."""
        try:
            return Owner(**json.loads(self.file(name).read_text()))
        except (OSError, ValueError):
            return None

    def _write_private(self, name: str, text: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(self.file(name), flags, 0o600), "w") as file:
            file.write(text)

    def renew_lease(self) -> None:
        """Change the lease's stamp. Needs no disk space, and readers compare stamps, not clocks."""
        path = self.file("lease")
        if not path.exists():
            path.touch(mode=0o600)
        os.utime(path, ns=(time.monotonic_ns(), time.monotonic_ns()))

    def remove(self) -> None:
        """Delete the directory; safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)


class Lease:
    """A reader's side of the lease: how long ago, by its own clock, the stamp last changed."""

    def __init__(self, rundir: RunDir, lease_s: float) -> None:
        self._path = rundir.file("lease")
        self._lease_s = lease_s
        self._stamp = self._read()
        self._renewed = time.monotonic()

    def has_run_out(self) -> bool:
        """Whether the stamp has stood still for longer than the lease, or the directory is gone."""
        stamp = self._read()
        if stamp is None:
            return True
        if stamp != self._stamp:
            self._stamp, self._renewed = stamp, time.monotonic()
        return time.monotonic() - self._renewed > self._lease_s

    def _read(self) -> int | None:
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return None


def runtime_root() -> Path:
    """The folder that holds this user's clusters, made if need be.

    It is in $XDG_RUNTIME_DIR, else in the temporary folder. Raises PermissionError where the folder
    belongs to somebody else or others may enter it.
    """
    candidates = [
        Path(tempfile.gettempdir()) / f"nbdist-{os.getuid()}",
        Path("/tmp") / f"nbdist-{os.getuid()}",  # noqa: S108 - made 0700 and checked below
    ]
    if xdg := os.environ.get("XDG_RUNTIME_DIR"):
        candidates.insert(0, Path(xdg) / "nbdist")
    for path in candidates:
        if len(str(path)) + len(_LONGEST_NAME) > MAX_SOCKET_PATH:
            continue
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue
        info = path.lstat()
        if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise PermissionError(
                f"{path} must belong to uid {os.getuid()} alone (mode 0700); it holds keys"
            )
        return path
    raise PermissionError(
        f"no folder for sockets: tried {', '.join(map(str, candidates))}; "
        "set XDG_RUNTIME_DIR to a short path of yours"
    )


def all_rundirs() -> Iterator[RunDir]:
    """Every cluster directory of this user."""
    for path in sorted(runtime_root().iterdir()):
        if (path / "cluster.json").exists() or (path / "logs").exists():
            yield RunDir(path)
