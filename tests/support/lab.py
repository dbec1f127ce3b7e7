"""A JupyterLab or Notebook 7 of its own, driven by headless Chromium, cut off from the network."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any, Self

import nbformat

CHROMIUM = (
    os.environ.get("NBDIST_CHROMIUM")
    or shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
ROOT = Path(__file__).resolve().parents[2]
KERNEL_PATHS = (str(ROOT), str(ROOT / "tests" / "support"))
"""Where kernels find this package, installed or not, and what tests share."""
START_LIMIT_S = 60
_KERNELSPEC = {
    "name": "python3",
    "display_name": "Python 3 (ipykernel)",
    "language": "python",
}

PLAIN_KERNEL = "plain"
_PLAIN_KERNEL = """
from ipykernel.kernelapp import launch_new_instance
from ipykernel.kernelbase import Kernel
Kernel._supports_kernel_subshells = property(lambda _: False)
launch_new_instance()
"""


def write_notebook(path: Path, *cells: str, kernel: str = "python3") -> None:
    """A notebook of code cells."""
    spec = _KERNELSPEC | {"name": kernel}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": spec})
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(notebook, path)


class Server:
    """One server; a context manager that ends it and its kernels."""

    def __init__(
        self,
        folder: Path,
        app: str = "jupyterlab",
        theme: str = "JupyterLab Light",
        base: str = "/",
    ):
        self.folder = folder
        self.app = app
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.base = base
        self.url = f"http://127.0.0.1:{self.port}{base}"
        self._settings(theme)
        self._add_kernel()
        self._log = (folder / "server.log").open("w")

    def _settings(self, theme: str) -> None:
        chosen = {
            "notification": {"fetchNews": "false", "checkForUpdates": False},
            "themes": {"theme": theme},
        }
        room = self.folder / "settings" / "@jupyterlab" / "apputils-extension"
        room.mkdir(parents=True, exist_ok=True)
        for name, values in chosen.items():
            (room / f"{name}.jupyterlab-settings").write_text(json.dumps(values))

    def _add_kernel(self) -> None:
        """One without subshells, as ipykernel was before version 7."""
        room = self.folder / "data" / "kernels" / PLAIN_KERNEL
        room.mkdir(parents=True)
        argv = [sys.executable, "-c", _PLAIN_KERNEL, "-f", "{connection_file}"]
        spec = {"argv": argv, "display_name": "Without subshells", "language": "python"}
        (room / "kernel.json").write_text(json.dumps(spec))

    def __enter__(self) -> Self:
        own = {
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTER_DATA_DIR": "data",
            "IPYTHONDIR": "ipython",
        }
        env = os.environ | {name: str(self.folder / room) for name, room in own.items()}
        env["PYTHONPATH"] = os.pathsep.join(KERNEL_PATHS)
        exposed = "LabApp" if self.app == "jupyterlab" else "JupyterNotebookApp"
        command = [
            *(sys.executable, "-m", self.app, "--no-browser", "--allow-root"),
            f"--ServerApp.port={self.port}",
            "--ServerApp.port_retries=0",
            "--IdentityProvider.token=",
            "--ServerApp.disable_check_xsrf=True",
            f"--{exposed}.expose_app_in_browser=True",
            f"--ServerApp.root_dir={self.folder}",
            f"--ServerApp.base_url={self.base}",
        ]
        self._process = subprocess.Popen(
            command, env=env, stdout=self._log, stderr=self._log, cwd=self.folder
        )
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            with contextlib.suppress(OSError):
                self.ask("api/status")
                return self
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = (self.folder / "server.log").read_text()[-2000:]
                self.__exit__()
                raise RuntimeError(f"the server did not start:\n{log}")
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                self.end_kernels()
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def end_kernels(self) -> None:
        """Shut all kernels down."""
        for session in self.ask("api/sessions"):
            self.ask(f"api/sessions/{session['id']}", "DELETE")

    def ask(self, path: str, method: str = "GET") -> Any:
        """Ask the server's own interface."""
        request = urllib.request.Request(self.url + path, method=method)
        body = urllib.request.urlopen(request, timeout=START_LIMIT_S).read()
        return json.loads(body) if body else None


class Notebook:
    """A page with a notebook; what it asks of other hosts is refused and remembered."""

    def __init__(
        self, server: Server, browser: Any, name: str, size: tuple[int, int] = (1300, 900)
    ):
        self.server, self.name = server, name
        self._workspace = uuid.uuid4().hex
        self.errors: list[str] = []
        self.outside: list[str] = []
        self.page = browser.new_page()
        self.page.set_viewport_size({"width": size[0], "height": size[1]})
        self.page.set_default_timeout(START_LIMIT_S * 1000)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._on_request)
        self.open()
        self.errors.clear()  # before a cell runs they are the application's own

    def _on_console(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.server.url, "blob:", "data:")):
            self.outside.append(request.url)

    def open(self) -> None:
        """Load the page, or load it again."""
        is_lab = self.server.app == "jupyterlab"
        # A workspace of its own: Lab opens again what the last page of a workspace had open.
        tree = f"lab/workspaces/{self._workspace}/tree" if is_lab else "notebooks"
        self.page.goto(f"{self.server.url}{tree}/{self.name}")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=START_LIMIT_S * 1000)
        self.page.wait_for_function(
            "() => { const s = window.jupyterapp?.shell.currentWidget?.sessionContext; "
            "return s?.session?.kernel?.connectionStatus === 'connected'; }",
            timeout=START_LIMIT_S * 1000,
        )

    def run(self, index: int, *, wait: bool = True) -> None:
        """Run one cell, by command; returns when it has ended."""
        self.page.evaluate(
            "(i) => { const n = window.jupyterapp.shell.currentWidget.content; "
            "n.activeCellIndex = i; n.deselectAll(); }",
            index,
        )
        run = "window.jupyterapp.commands.execute('notebook:run-cell')"
        self.page.evaluate(f"() => {run}" if wait else f"() => {{ {run}; }}")

    def text(self, index: int) -> str:
        """All that the outputs of a cell say."""
        return self.page.evaluate(
            "(i) => JSON.stringify(window.jupyterapp.shell.currentWidget.content.widgets[i]"
            ".model.outputs.toJSON())",
            index,
        )

    def save(self) -> None:
        """Write the notebook to its file."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    def scroll_to(self, index: int) -> None:
        """Have a cell in sight."""
        self.page.evaluate(
            "(i) => { const n = window.jupyterapp.shell.currentWidget.content; "
            "n.activeCellIndex = i; n.deselectAll(); return n.scrollToItem(i); }",
            index,
        )

    def command(self, name: str, **options: Any) -> None:
        """Run a command of the application."""
        self.page.evaluate(
            "([name, options]) => void window.jupyterapp.commands.execute(name, options)",
            [name, options],
        )

    def close(self) -> None:
        """Close the page."""
        self.page.close()
