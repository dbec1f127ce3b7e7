"""What an engine prints: to whoever runs the cell, and to the slot's log."""

from __future__ import annotations

import io
import os
import threading

import pytest
import zmq
from ipykernel.iostream import IOPubThread, OutStream
from jupyter_client.session import Session

from nbdist.engine import output as module
from nbdist.engine.output import LoggedStream, open_log


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """No log is open when a test begins."""
    monkeypatch.setattr(module, "_log", None)


@pytest.fixture
def stream():
    """A stream of the kernel's whose thread does not run; nothing leaves it."""
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        thread = IOPubThread(socket)
        stream = LoggedStream(Session(key=b"k"), thread, "stdout", watchfd=False)
        yield stream
        stream.close()
        thread._event_pipe.close()
        thread._event_puller.close()
        thread.io_loop.close()


def test_the_log_is_where_the_errors_went(capfd):
    """Line by line, on a descriptor that goes on when the standard one is captured."""
    log = open_log()
    assert log.fileno() > 2
    assert open_log() is log
    log.write("a line\n")
    log.write("\ud800 that no encoding has\n")
    assert capfd.readouterr().err == "a line\n? that no encoding has\n"
    log.close()


def test_the_log_outlives_what_happens_to_the_standard_descriptor(capfd):
    """ipykernel puts a pipe there."""
    log, kept = open_log(), os.dup(2)
    os.dup2(1, 2)
    log.write("to the log\n")
    os.dup2(kept, 2)
    os.close(kept)
    log.close()
    assert capfd.readouterr().err == "to the log\n"


def test_what_is_printed_goes_to_both(stream, monkeypatch):
    """To whoever runs the cell, and to the log; the number of characters comes back."""
    monkeypatch.setattr(module, "_log", io.StringIO())
    assert stream.write("hello\n") == len("hello\n")
    print("world", file=stream)
    assert module._log.getvalue() == "hello\nworld\n"
    assert ["".join(text) for _, text in stream._flush_buffers()] == ["hello\nworld\n"]


def test_a_number_comes_back_from_every_release_of_ipykernel(stream, monkeypatch):
    """Some give none; `print` and others want one."""
    monkeypatch.setattr(module, "_log", io.StringIO())
    monkeypatch.setattr(OutStream, "write", lambda *_: None)
    assert stream.write("hello") == 0


def test_what_native_code_wrote_is_not_logged_twice(stream, monkeypatch):
    """ipykernel's thread copies it to the log itself, and passes it on here."""
    monkeypatch.setattr(module, "_log", io.StringIO())
    written = []
    monkeypatch.setattr(OutStream, "write", lambda _, text: written.append(text))
    watcher = threading.Thread(target=stream.write, args=("from C\n",))
    stream.watch_fd_thread = watcher
    watcher.start()
    watcher.join(5)
    stream.write("from Python\n")
    assert written == ["from C\n", "from Python\n"]
    assert module._log.getvalue() == "from Python\n"
