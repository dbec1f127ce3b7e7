"""The magics on a cluster that only takes notes, and what importing nbdist does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import nbdist
from nbdist import compat, errors
from nbdist.frontend import magics, rewriting, run_magics, variables
from nbdist.frontend.arguments import without_comment
from nbdist.protocol import runs as rn
from nbdist.protocol.story import ROWS
from nbdist.protocol.variables import Described
from nbdist.session.outputs import CellResult, Progress, RankOutput
from nbdist.session.run import Detached, Run
from nbdist.session.saving import Checkpoint
from nbdist.session.variables import compare

LINE_MAGICS = {
    "dist_dashboard", "dist_init", "dist_kill", "dist_mode", "dist_pause", "dist_pull", "dist_push",
    "dist_load", "dist_reset", "dist_resume", "dist_save", "dist_scale", "dist_set",
    "dist_shutdown", "dist_slow", "dist_status", "dist_step", "dist_stop", "dist_train",
    "dist_vars", "sync",
}  # fmt: skip
START_DEFAULTS = {
    "devices": None, "backend": "auto", "launcher": "local", "hosts": [], "policy": "refill",
    "keep": False,
}  # fmt: skip


class ShownAsText:
    """Stands for a dashboard."""

    def __repr__(self):
        return "a dashboard"


class FakeCluster:
    """Notes the calls; its ranks print `hi`."""

    def __init__(self):
        self.world_size = 4
        self.generation = 1
        self.incidents = []
        self.warnings, self.risk = [], []
        self.calls = []
        self.error = None
        self.trouble = ""
        self.runs = []
        self.found = []
        self.dashboards = SimpleNamespace(open=self.open_dashboard)
        self.state = "running"

    def open_dashboard(self, *views):
        self.calls.append(("dashboard", *views))
        return ShownAsText()

    def train(self, name, *, steps):
        self.calls.append(("train", name, steps))
        spec = rn.RunSpec(run="r1", name=name)
        self.runs.append(Run(spec, self.ask, 1))
        self.runs[-1].first_step = 7
        self.runs[-1].hear(rn.RunView(spec=spec, state="running", target=7 + steps), ())
        return self.runs[-1]

    def save(self, path, name, *, keep):
        self.calls.append(("save", path, name, keep))
        return Checkpoint(Path(path) / "step-7", name or "trainer", 7, 1_234_567, 0.01)

    def load(self, path, name):
        self.calls.append(("load", path, name))
        notes = ("passed over: step-9 is damaged",)
        return Checkpoint(Path(path) / "step-7", name or "trainer", 7, 1_234_567, 0.01, notes)

    def ask(self, order, _timeout):
        """The supervisor: notes orders to runs; the run is over when a test says so."""
        run = self.runs[-1]
        view = rn.RunView(spec=run.spec, state=self.state, target=run.target)
        if isinstance(order, rn.QueryRun):
            made = np.zeros(3, ROWS)
            made["step"], made["loss"] = [7, 8, 9], 0.5
            rows = made[order.num_known :].tobytes()
            return rn.RunReport(
                view=view, first=order.num_known, rows=rows, durable=0, evaluations=()
            )
        if self.error:
            raise self.error
        self.calls.append(order)
        states = {"step": "paused", "pause": "paused", "resume": "running", "stop": "stopped"}
        self.state = states.get(getattr(order, "action", ""), self.state)
        run.hear(rn.RunView(spec=run.spec, state=self.state, target=run.target), ())
        return None

    def run(self, code, *, ranks=None, timeout=None, once=False, watch=None):
        self.calls.append(("run", code, ranks, timeout, once))
        outputs = {rank: RankOutput() for rank in ranks or range(self.world_size)}
        for output in outputs.values():
            output.add_text("stdout", "hi\n")
            output.state = "error" if self.error else "ok"
        if watch is not None:
            watch(Progress("c", outputs, done=True, generation=1, seconds=0.1))
        if self.error:
            raise self.error
        return CellResult(dict.fromkeys(outputs, "hi\n"), {key: {} for key in outputs}, 1, 0.1)

    def push(self, *, ranks=None, **values):
        self.calls.append(("push", ranks, values))

    def pull(self, name, *, ranks=None):
        self.calls.append(("pull", name, ranks))
        return {rank: rank * 10 for rank in ranks or range(self.world_size)}

    def variables(self, *names):
        self.calls.append(("variables", *names))
        return self.found

    def check_alive(self):
        if self.state == "failed":
            raise errors.RecoveryFailed("nobody is left. End it with %dist_reset")

    def kill(self, ranks, *, signal="KILL"):
        self.calls.append(("kill", ranks, signal))

    def slow(self, ranks, factor):
        self.calls.append(("slow", ranks, factor))
        self.warnings += self.risk

    def scale(self, size):
        self.calls.append(("scale", size))
        self.world_size, self.generation = size, self.generation + 1
        self.warnings.append("more engines than cores")

    def sync(self):
        self.calls.append(("sync",))

    def shutdown(self):
        self.calls.append(("shutdown",))
        if self.error:
            raise self.error

    def status(self):
        one = {
            "state": "member", "generation": 1, "device": "cpu", "pid": 5, "host": "here",
            "memory_bytes": 0, "step": None, "samples_per_second": None, "activity": "",
            "slow_factor": 1.0,
            "not_restored": {"opt": "why"},
        }  # fmt: skip
        return [SimpleNamespace(rank=n, slot=n, **one) for n in range(self.world_size)]


@pytest.fixture(scope="module")
def bare_shell(tmp_path_factory):
    """An IPython shell without a front end, taken down afterwards."""
    config = Config({"HistoryManager": {"enabled": False}})
    folder = str(tmp_path_factory.mktemp("ipython"))
    shell = InteractiveShell.instance(config=config, ipython_dir=folder)
    yield shell
    shell.restore_sys_module_state()
    InteractiveShell.clear_instance()


@pytest.fixture(autouse=True)
def published(bare_shell, monkeypatch):
    """Everything that is displayed."""
    publisher = CapturingDisplayPublisher()
    monkeypatch.setattr(bare_shell, "display_pub", publisher)
    return publisher.outputs


@pytest.fixture(autouse=True)
def session(monkeypatch):
    """The session as the magics see it: nothing runs; `start` makes a FakeCluster."""
    fake = SimpleNamespace(cluster=None, started=[], error=None, warnings=["fork is not possible"])

    def start(num_engines=None, **options):
        fake.started.append((num_engines, options))
        if fake.error:
            raise fake.error
        fake.cluster = FakeCluster()
        fake.cluster.warnings = list(fake.warnings)
        return fake.cluster

    def current():
        if fake.cluster is None:
            raise errors.NotStarted("no cluster runs; start one with %dist_init")
        return fake.cluster

    for module in (magics, run_magics, variables, compat):
        monkeypatch.setattr(module, "session", SimpleNamespace(start=start, current=current))
    return fake


@pytest.fixture
def shell(bare_shell):
    """The shell with the magics loaded; they and its variables are gone afterwards."""
    known = dict(bare_shell.user_ns)
    nbdist.load_ipython_extension(bare_shell)
    yield bare_shell
    nbdist.unload_ipython_extension(bare_shell)
    bare_shell.user_ns.clear()
    bare_shell.user_ns.update(known)


@pytest.fixture
def cluster(session):
    """A cluster of four ranks that runs."""
    session.cluster = FakeCluster()
    return session.cluster


def run(shell, cell):
    """Run a cell and raise what it raised."""
    shell.run_cell(cell).raise_error()


def registered(shell, kind):
    return set(shell.magics_manager.magics[kind])


# ---- loading


def test_loading_adds_exactly_the_magics_there_are(shell):
    """What comes later is not registered yet."""
    names = {
        name for name in registered(shell, "line") if name.startswith("dist") or name == "sync"
    }
    assert names == LINE_MAGICS
    assert {name for name in registered(shell, "cell") if name[:4] in {"dist", "rank"}} == {
        "distributed",
        "rank",
    }


def test_unloading_leaves_nothing_behind(bare_shell):
    """Magics and the reading of %%rank are gone; loading twice adds the latter once."""
    lines, cells = registered(bare_shell, "line"), registered(bare_shell, "cell")
    transformers = list(bare_shell.input_transformers_cleanup)
    nbdist.load_ipython_extension(bare_shell)
    nbdist.load_ipython_extension(bare_shell)
    assert len(bare_shell.input_transformers_cleanup) == len(transformers) + 1
    nbdist.unload_ipython_extension(bare_shell)
    assert bare_shell.input_transformers_cleanup == transformers
    assert (registered(bare_shell, "line"), registered(bare_shell, "cell")) == (lines, cells)
    assert bare_shell.run_cell("%%rank[0]\nx").error_in_exec.__class__ is UsageError


@pytest.mark.parametrize("name", sorted([*LINE_MAGICS, "distributed", "rank"]))
def test_every_magic_has_its_docstring_as_help(name):
    """The help says what the magic does, in a sentence, and has a word on every argument."""
    method = next(getattr(cls, name) for cls in magics._CLASSES if hasattr(cls, name))
    usage, _, rest = method.__doc__.strip().removeprefix("::").strip().partition("\n\n")
    assert usage.startswith(f"%{name}")
    assert "." in rest.split("\n\n")[0]
    assert all(action.help for action in method.parser._actions)


# ---- %dist_init, %dist_status, and the end


def test_init_starts_with_the_defaults_and_lists_the_ranks(shell, session, capsys):
    """Without arguments the session decides; its warnings are shown below the table."""
    run(shell, "%dist_init")
    assert session.started == [(None, START_DEFAULTS)]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rank", "slot", "device"]
    assert [line.split() for line in lines[1:5]] == [[str(n), str(n), "cpu"] for n in range(4)]
    assert lines[5:] == ["Warning: fork is not possible"]


def test_init_passes_every_option_on(shell, session, capsys):
    """Each option of the magic is the keyword of `start`, quoted or not."""
    run(
        shell,
        "%dist_init -n 3 -g '0,1,3' --backend nccl --launcher ssh --hosts \"a, b\" "
        "--policy shrink --keep -v",
    )
    expected = {
        "devices": [0, 1, 3], "backend": "nccl", "launcher": "ssh", "hosts": ["a", "b"],
        "policy": "shrink", "keep": True,
    }  # fmt: skip
    assert session.started == [(3, expected)]
    assert capsys.readouterr().out.split()[:5] == ["rank", "slot", "device", "host", "pid"]


def test_init_twice_says_so_and_changes_nothing(shell, session, cluster, capsys):
    """The second call starts nothing, whatever its options."""
    run(shell, "%dist_init -n 2")
    assert session.started == []
    assert cluster.calls == []
    assert capsys.readouterr().out.startswith("Already running: ranks 0-3, generation 1.\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "%dist_init -n 2",
            "Nothing was changed; %dist_scale 2 makes it 2, %dist_shutdown ends it.",
        ),
        ("%dist_init -n 4", "Nothing was changed; %dist_shutdown ends it."),
        ("%dist_init", "Nothing was changed; %dist_shutdown ends it."),
    ],
)
def test_init_of_another_size_names_the_magic_that_scales(shell, cluster, capsys, line, said):
    """Where the size is another one."""
    run(shell, line)
    assert capsys.readouterr().out.splitlines()[-1] == said
    assert cluster.calls == []


def test_that_engines_share_cores_is_said_by_status_and_not_at_the_start(
    shell, session, capsys, monkeypatch
):
    """What a notebook shows of its start is the same on every machine."""
    monkeypatch.setattr(magics, "crowding", lambda size: [f"{size} engines share 2 cores"])
    session.warnings = ["4 engines share 2 cores", "fork is not possible"]
    run(shell, "%dist_init -n 4")
    assert capsys.readouterr().out.splitlines()[5:] == ["Warning: fork is not possible"]
    run(shell, "%dist_status")
    assert "Warning: 4 engines share 2 cores" in capsys.readouterr().out


def test_a_setting_that_the_session_refuses_is_a_usage_error(shell, session):
    """The session's words are shown, without our frames; its own errors stay what they are."""
    session.error = ValueError("policy='wait' is not there yet; use refill or shrink")
    with pytest.raises(UsageError, match="not there yet"):
        run(shell, "%dist_init --policy wait")
    session.error = errors.TargetError("of the session")
    with pytest.raises(errors.TargetError, match="of the session"):
        run(shell, "%dist_init")


def test_status_shows_ranks_and_what_was_not_restored(shell, cluster, capsys):
    """One row a rank, then a line for each name that a rank lacks, and warnings."""
    cluster.warnings = ["fork is not possible"]
    run(shell, "%dist_status")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[5] == "Not restored on rank 0: opt (why)"
    assert lines[9] == "Warning: fork is not possible"


def test_shutdown_and_reset_end_the_cluster(shell, cluster):
    """Both shut down what runs."""
    run(shell, "%dist_shutdown")
    run(shell, "%dist_reset")
    assert cluster.calls == [("shutdown",), ("shutdown",)]


def test_reset_is_fine_without_a_cluster_or_with_a_broken_one(shell, session, capsys):
    """It says what it found instead of failing."""
    run(shell, "%dist_reset")
    assert capsys.readouterr().out == "No cluster runs.\n"
    session.cluster = FakeCluster()
    session.cluster.error = errors.WrongState("the supervisor is gone")
    run(shell, "%dist_reset")
    assert "the supervisor is gone" in capsys.readouterr().out


@pytest.mark.parametrize(
    "cell",
    ["%sync", "%dist_status", "%dist_shutdown", "%dist_kill 0", "%dist_slow 0 2", "%dist_scale 2",
     "%dist_pull q", "%dist_push one", "%%distributed\n1", "%%rank[0]\n1", "%dist_train t",
     "%dist_step", "%dist_pause", "%dist_resume", "%dist_stop", "%dist_set lr=1", "%dist_vars"],
)  # fmt: skip
def test_without_a_cluster_the_error_names_the_magic_that_starts_one(shell, cell):
    """Everything but %dist_init and %dist_reset needs a cluster."""
    shell.user_ns["one"] = 1
    with pytest.raises(errors.NotStarted, match="%dist_init"):
        run(shell, cell)


# ---- cells


@pytest.mark.parametrize(
    ("first", "ranks", "timeout", "once"),
    [
        ("%%distributed", None, None, False),
        ("%%distributed -r all", None, None, False),
        ("%%distributed -r 0,2 -t 1.5 --once", (0, 2), 1.5, True),
        ("%%distributed --ranks '1 - 2'", (1, 2), None, False),
        ("%%rank[0,2-3]", (0, 2, 3), None, False),
        ("%%rank [1]", (1,), None, False),
        ("%%rank[ !2 ] --once -t 5", (0, 1, 3), 5.0, True),
        ("%%rank[-2:]", (2, 3), None, False),
        ("%%rank[all]", None, None, False),
    ],
)
def test_both_cell_magics_hand_over_ranks_and_options(shell, cluster, first, ranks, timeout, once):
    """The session gets the untransformed source and what the first line asks for."""
    run(shell, f"{first}\nawait x\n!ls\n")
    assert cluster.calls == [("run", "await x\n!ls\n", ranks, timeout, once)]


@pytest.mark.usefixtures("cluster")
def test_other_cells_are_left_alone(shell):
    """Only a first line that begins with %%rank[ is rewritten."""
    for lines in ([], ["x = '%%rank[0]'\n"], ["x\n", "%%rank[0]\n"], ["%%ranks[0]\n"]):
        assert rewriting.rewrite_rank_cell(lines) == lines
    run(shell, "kept = '''\n%%rank[0]\n'''")
    assert shell.user_ns["kept"] == "\n%%rank[0]\n"


def test_a_cell_may_be_blank_or_nested(shell, cluster):
    """A body of blank lines runs; a distributed cell inside another magic's cell does too."""
    run(shell, "%%distributed\n\n")
    run(shell, "%%capture\n%%rank[1]\nx")
    assert [call[1:3] for call in cluster.calls] == [("\n", None), ("x\n", (1,))]


@pytest.mark.usefixtures("cluster")
def test_output_is_shown_folded(shell, published):
    """Without a kernel the cell has one display, at its end."""
    run(shell, "%%distributed\nprint('hi')")
    assert [one["data"] for one in published] == [{"text/plain": "[ranks 0-3]\nhi"}]


@pytest.mark.usefixtures("cluster")
def test_the_result_is_stored_on_demand(shell):
    """-o names the variable of this notebook; without it nothing is stored."""
    run(shell, "%%distributed -o got\n1")
    assert shell.user_ns["got"].outputs == dict.fromkeys(range(4), "hi\n")


def test_a_failing_cell_fails_here_and_shows_its_output_before(shell, cluster, published):
    """The session's error goes through, so that every front end sees a failed cell."""
    cluster.error = errors.CellFailed("failed on rank 1", {1: errors.RankError(1, "E", "e")})
    with pytest.raises(errors.CellFailed, match="failed on rank 1"):
        run(shell, "%%distributed -o got\nboom()")
    assert "got" not in shell.user_ns
    assert published[0]["data"]["text/plain"] == "[ranks 0-3, failed]\nhi"


def test_an_interrupt_goes_through(shell, cluster):
    """Stop ends the cell with the KeyboardInterrupt that the session raises."""
    cluster.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(shell, "%%distributed\nwhile True: pass")


@pytest.mark.parametrize("body", ["for:\n  pass", "x = (", "return 1", "def f(:", "!ls\nx ="])
def test_a_syntax_error_is_found_before_anything_is_sent(shell, cluster, body):
    """It is one SyntaxError, raised here."""
    with pytest.raises(SyntaxError):
        run(shell, f"%%distributed\n{body}")
    assert cluster.calls == []


@pytest.mark.parametrize(
    "body", ["await f()", "async with a: pass", "%time x", "%%time\nx", "!ls", "f?", "'\\d'"]
)
def test_what_ipython_understands_is_sent(shell, cluster, body, recwarn):
    """IPython's syntax passes the check, as written; warnings about it come from the engines."""
    run(shell, f"%%distributed\n{body}")
    assert cluster.calls[0][1] == f"{body}\n"
    assert not recwarn.list


# ---- plain cells as distributed ones


@pytest.mark.parametrize(
    "cell", ["x = 1\n", "# why\n\nx\n", "!ls\n", "f?\n", "await x\n", "x = 5\n%time x\n", "  x\n"]
)
def test_in_the_mode_a_plain_cell_runs_on_all_ranks(shell, cluster, cell):
    """As it was written; without the mode nothing of it reaches the engines."""
    run(shell, "%dist_mode -e")
    run(shell, cell)
    assert [call[1:3] for call in cluster.calls] == [(cell.replace("  x", "x"), None)]


@pytest.mark.parametrize("cell", ["", "\n", "# a comment\n", "%sync", "# then\n%sync", "%time 1"])
def test_in_the_mode_other_cells_stay_as_they_are(shell, cluster, cell):
    """What begins with a magic, and what does nothing."""
    run(shell, "%dist_mode -e")
    run(shell, cell)
    assert {call[0] for call in cluster.calls} <= {"sync"}


def test_in_the_mode_what_a_cell_has_ipython_run_is_not_rewritten(shell, cluster):
    """The body of another magic's cell runs here; a distributed cell is what it says it is."""
    run(shell, "%dist_mode -e")
    run(shell, "%%capture\nhere = 1")
    assert (shell.user_ns["here"], cluster.calls) == (1, [])
    run(shell, "%%rank[1]\nx")
    run(shell, "%%distributed --once\ny")
    assert [call[1:3] for call in cluster.calls] == [("x\n", (1,)), ("y\n", None)]


def test_in_the_mode_a_syntax_error_is_found_before_anything_is_sent(shell, cluster):
    """As in a cell that says %%distributed."""
    run(shell, "%dist_mode --enable")
    with pytest.raises(SyntaxError):
        run(shell, "for:\n  pass")
    assert cluster.calls == []


@pytest.mark.parametrize("end", ["%dist_mode -d", "%dist_shutdown", "%dist_reset", "%unload_ext"])
def test_the_mode_ends(shell, cluster, capsys, end):
    """By its magic, with the cluster, and with the magics; then plain cells run here."""
    run(shell, "%dist_mode")
    run(shell, "%dist_mode -e")
    run(shell, "%dist_mode -e")
    if end == "%unload_ext":
        nbdist.unload_ipython_extension(shell)
    else:
        run(shell, end)
        run(shell, "%dist_mode")
        assert capsys.readouterr().out.splitlines()[-1] == rewriting.MODE_OFF
    run(shell, "here = 2")
    assert shell.user_ns["here"] == 2
    assert {call[0] for call in cluster.calls} <= {"shutdown"}


@pytest.mark.usefixtures("cluster")
def test_the_mode_says_which_is_so(shell, capsys):
    """Without an argument nothing changes; both at once are refused."""
    run(shell, "%dist_mode")
    with pytest.raises(UsageError, match="-e and -d"):
        run(shell, "%dist_mode -e -d")
    run(shell, "%dist_mode -e")
    run(shell, "%dist_mode")
    said = capsys.readouterr().out.splitlines()
    assert said == [rewriting.MODE_OFF, rewriting.MODE_ON, rewriting.MODE_ON]


@pytest.mark.usefixtures("cluster")
def test_in_the_mode_a_terminal_still_knows_what_is_complete(shell):
    """A plain line is not taken for the beginning of a cell magic's cell."""
    run(shell, "%dist_mode -e")
    assert shell.check_complete("x = 1")[0] == "complete"


# ---- notebooks of another package


@pytest.fixture
def compatible(bare_shell, shell, monkeypatch):
    """The shell with the other package's names; on a host without a GPU."""
    monkeypatch.setattr(compat, "count_gpus", lambda: SimpleNamespace(count=0))
    compat.load_ipython_extension(bare_shell)
    yield shell
    compat.unload_ipython_extension(bare_shell)


def test_its_start_has_its_defaults(compatible, session, capsys):
    """Two engines, `gpu_id` on each, also on those that join later, and plain cells run there."""
    run(compatible, "%dist_init")
    assert session.started == [(2, START_DEFAULTS)]
    assert session.cluster.calls == [("run", compat.BIND_NAMES, None, None, False)]
    assert capsys.readouterr().out.splitlines()[-1] == rewriting.MODE_ON
    run(compatible, "x")
    run(compatible, "%%rank [0-1]\ny")
    assert [call[1:3] for call in session.cluster.calls[1:]] == [("x\n", None), ("y\n", (0, 1))]


@pytest.mark.parametrize(
    ("line", "gpus", "devices", "said"),
    [
        ("-n 3 -g '0,1,2,3'", 4, [0, 1, 2], ""),
        ("--num-processes 3 --gpu-ids 5,6,7 -a localhost", 8, [5, 6, 7], ""),
        ("-n 3 -g 0,1,2", 0, None, "Warning: --gpu-ids has no effect: there is no GPU"),
        ("-n 3 -a 10.0.0.1", 0, None, "Warning: --master-addr has no effect"),
        ("-n 3 -t 60.0", 0, None, "Warning: --timeout has no effect: cells have no deadline"),
    ],
)
def test_its_options_are_taken(compatible, session, capsys, monkeypatch, line, gpus, devices, said):
    """What one of them cannot do here is said once."""
    monkeypatch.setattr(compat, "count_gpus", lambda: SimpleNamespace(count=gpus))
    run(compatible, f"%dist_init {line}")
    assert session.started == [(3, START_DEFAULTS | {"devices": devices})]
    assert said in capsys.readouterr().out


@pytest.mark.usefixtures("cluster")
def test_its_second_start_changes_nothing(compatible, session, capsys):
    """It says that a cluster runs, as ours does; the mode is as it was."""
    run(compatible, "%dist_init -n 2")
    assert (session.started, session.cluster.calls) == ([], [])
    assert capsys.readouterr().out.startswith("Already running")
    assert not rewriting.is_mode_on(compatible)


def test_its_magics_are_taken_away_again(bare_shell):
    """All of them, and its help says what it does."""
    before = {kind: registered(bare_shell, kind) for kind in ("line", "cell")}
    compat.load_ipython_extension(bare_shell)
    usage = compat.CompatMagics.dist_init.__doc__
    assert "--num-processes" in usage
    compat.unload_ipython_extension(bare_shell)
    assert {kind: registered(bare_shell, kind) for kind in before} == before


# ---- values and faults


def test_push_sends_the_named_variables(shell, cluster, capsys):
    """Several names are one push, to all ranks or those named."""
    shell.user_ns.update(a=1, b=[2])
    run(shell, "%dist_push a b")
    run(shell, "%dist_push a -r 0,2")
    assert cluster.calls == [("push", None, {"a": 1, "b": [2]}), ("push", (0, 2), {"a": 1})]
    assert capsys.readouterr().out == "Pushed a, b to ranks 0-3.\nPushed a to ranks 0,2.\n"


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("%dist_pull got", {0: 0, 1: 10, 2: 20, 3: 30}),
        ("%dist_pull got -r 1,2", {1: 10, 2: 20}),
        ("%dist_pull got -r 2", 20),
        ("%dist_pull got -r all", {0: 0, 1: 10, 2: 20, 3: 30}),
    ],
)
def test_pull_gives_a_dict_or_the_value_of_one_named_rank(shell, line, value):
    """One named rank gives its value; everything else a dict by rank."""
    run(shell, line)
    assert shell.user_ns["got"] == value


def test_pull_does_not_overwrite_unless_forced(shell, cluster):
    """A variable of the notebook survives, and nothing is fetched, without -f."""
    shell.user_ns["mine"] = "old"
    with pytest.raises(UsageError, match="'mine' already; -f overwrites"):
        run(shell, "%dist_pull mine")
    assert (shell.user_ns["mine"], cluster.calls) == ("old", [])
    run(shell, "%dist_pull mine -r 3 -f")
    assert shell.user_ns["mine"] == 30


@pytest.mark.parametrize(
    "line", ["%dist_kill 7", "%dist_slow 7 2", "%dist_pull x -r 7", "%%rank[7]\n1"]
)
def test_in_a_world_that_is_lost_no_rank_is_looked_for(shell, cluster, line):
    """What works then is said, not that the world could be grown."""
    cluster.state = "failed"
    with pytest.raises(errors.RecoveryFailed, match="%dist_reset"):
        run(shell, line)
    assert cluster.calls == []


@pytest.mark.parametrize(
    ("line", "ranks", "signal"),
    [
        ("%dist_kill 2", (2,), "KILL"),
        ("%dist_kill 0 3", (0, 3), "KILL"),
        ("%dist_kill 0, 2-3 --signal STOP", (0, 2, 3), "STOP"),
        ("%dist_kill !0 --signal TERM", (1, 2, 3), "TERM"),
    ],
)
def test_kill_takes_any_selection_and_a_signal(shell, cluster, capsys, line, ranks, signal):
    """Ranks may be several words; KILL is the default."""
    run(shell, line)
    assert cluster.calls == [("kill", ranks, signal)]
    assert capsys.readouterr().out.startswith(f"Sent {signal} to rank")


@pytest.mark.parametrize(
    ("line", "ranks", "factor", "said"),
    [
        ("%dist_slow 2 5", (2,), 5.0, "Now 5 times as slow: rank 2."),
        ("%dist_slow 0,3 1.5", (0, 3), 1.5, "Now 1.5 times as slow: ranks 0,3."),
        ("%dist_slow 1 1e9", (1,), 1e9, "Now 1e+09 times as slow: rank 1."),
        ("%dist_slow 1 '2.5E1'", (1,), 25.0, "Now 25 times as slow: rank 1."),
        ("%dist_slow all 1", (0, 1, 2, 3), 1.0, "Now as quick as before: ranks 0-3."),
    ],
)
def test_slow_takes_any_selection_and_a_factor(shell, cluster, capsys, line, ranks, factor, said):
    """A factor of 1 ends it."""
    run(shell, line)
    assert cluster.calls == [("slow", ranks, factor)]
    assert capsys.readouterr().out == f"{said}\n"


def test_slow_warns_of_what_may_come_of_it(shell, cluster, capsys):
    """Below the answer; what was warned of before is not repeated."""
    cluster.warnings, cluster.risk = ["old"], ["it may be ended as hung"]
    run(shell, "%dist_slow 1 1000")
    out = capsys.readouterr().out
    assert out == "Now 1000 times as slow: rank 1.\nWarning: it may be ended as hung\n"


def test_scale_shows_the_new_world_and_what_is_new_to_warn_of(shell, cluster, capsys):
    """Warnings that were shown before are not repeated."""
    cluster.warnings = ["old"]
    run(shell, "%dist_scale 6")
    assert cluster.calls == [("scale", 6)]
    out = capsys.readouterr().out
    assert out == "Running: ranks 0-5, generation 2.\nWarning: more engines than cores\n"


@pytest.mark.parametrize(
    ("line", "call", "said"),
    [
        (
            "%dist_save 'my runs'",
            ("save", "my runs", None, None),
            "Saved trainer at step 7 in my runs: 1.23 MB, whole and on disk.\n",
        ),
        (
            "%dist_save ckpt other --keep 3  # the newest",
            ("save", "ckpt", "other", 3),
            "Saved other at step 7 in ckpt: 1.23 MB, whole and on disk.\n",
        ),
        (
            "%dist_load ckpt",
            ("load", "ckpt", None),
            "Loaded ckpt: trainer stands at step 7.\nWarning: passed over: step-9 is damaged\n",
        ),
    ],
)
def test_a_trainer_is_saved_and_loaded(shell, cluster, capsys, line, call, said):
    """It is said how far the trainer is, and what was passed over."""
    run(shell, line)
    assert cluster.calls == [call]
    assert capsys.readouterr().out == said


def test_sync_is_a_barrier(shell, cluster, capsys):
    """It says who passed."""
    run(shell, "%sync")
    assert cluster.calls == [("sync",)]
    assert capsys.readouterr().out == "Barrier passed by ranks 0-3.\n"


# ---- variables


def test_variables_are_a_table_of_the_page_and_text_elsewhere(shell, cluster, published):
    """One display with both; what the user has named is escaped, and the rest is counted."""
    one = Described(type="int", text="'<b>'", digest="d")
    cluster.found = compare({rank: {f"x{n:03}": one for n in range(202)} for rank in range(2)})
    run(shell, "%dist_vars")
    ((data, _),) = [(shown["data"], shown["metadata"]) for shown in published]
    lines = data["text/plain"].splitlines()
    assert lines[0].split() == ["name", "type", "shape", "dtype", "device", "equal"]
    assert lines[1].split() == ["x000", "int", "yes", "'<b>'"]
    assert lines[-1] == "2 more; cluster.variables() has them."
    assert len(lines) == 202
    assert data["text/html"].count("<tr>") == 201
    assert "&lt;b&gt;" in data["text/html"]
    assert "<b>" not in data["text/html"]


def test_variables_may_be_named(shell, cluster, capsys):
    """The names go to the cluster; where there is nothing, a sentence says so."""
    run(shell, "%dist_vars a b")
    run(shell, "%dist_vars")
    assert cluster.calls == [("variables", "a", "b"), ("variables",)]
    assert capsys.readouterr().out == "The engines have no variables of yours.\n" * 2


def test_what_differs_is_said_in_a_few_words(shell, cluster, published):
    """Values, forms, ranks that lack it, how far, why not compared, what bars sending."""
    tensor = Described(type="Tensor", shape="(2,)", dtype="float32", device="cpu", digest="a")
    other = replace(tensor, digest="b")
    lock = Described(type="lock", not_compared="no", not_sent="no")
    half = Described(type="C", digest="c", not_sent="h.x cannot be sent")
    told = {
        0: {"a": tensor, "b": Described(type="int", text="1", digest="1"), "c": lock},
        1: {"a": other, "b": Described(type="int", text="2", digest="2"), "c": lock, "d": tensor},
        2: {"a": tensor, "b": Described(type="int", text="1", digest="1"), "c": lock, "h": half},
    }
    told[0]["h"] = told[1]["h"] = half
    told[2]["d"] = replace(tensor, shape="(3,)")
    cluster.found = compare(told)
    cluster.found[0] = replace(cluster.found[0], distance={1: 0.25})
    run(shell, "%dist_vars")
    rows = published[0]["data"]["text/plain"].splitlines()[1:]
    assert [re.split(r"  +", row) for row in rows] == [
        ["a", "Tensor", "(2,)", "float32", "cpu", "no", "rank 1 by up to 0.25 unlike rank 0"],
        ["b", "int", "no", "1 on ranks 0,2; 2 on rank 1"],
        ["c", "lock", "–", "not compared: no"],
        ["d", "Tensor", "(2,) on rank 1; (3,) on rank 2", "float32", "cpu", "no",
         "missing on rank 0; rank 2 unlike rank 1"],
        ["h", "C", "yes", "h.x cannot be sent"],
    ]  # fmt: skip


# ---- training runs


@pytest.mark.parametrize(
    ("line", "steps"), [("%dist_train t --steps 500", 500), ("%dist_train t", 100)]
)
def test_train_returns_at_once_and_says_what_runs(shell, cluster, capsys, line, steps):
    """In one line, with the magics that follow and drive it."""
    run(shell, line)
    assert cluster.calls == [("train", "t", steps)]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"Training t from step 7 to {7 + steps}. ")
    for name in ("dist_status", "dist_pause", "dist_step", "dist_set", "dist_stop"):
        assert f"%{name}" in line


def test_train_can_wait_for_the_end(shell, cluster, published):
    """Headless there is one display, at the end."""
    begin = cluster.train

    def train(name, *, steps):
        handle = begin(name, steps=steps)
        cluster.state = "finished"
        handle.hear(rn.RunView(spec=handle.spec, state="finished", target=10), ())
        return handle

    cluster.train = train
    run(shell, "%dist_train t --steps 3 --wait")
    texts = [one["data"]["text/plain"] for one in published]
    assert texts == ["t: finished, 10 of 10 steps, loss 0.5"]


def test_a_run_that_fails_while_it_is_waited_for_fails_the_cell(shell, cluster, published):
    """How far it came is shown before."""
    begin = cluster.train

    def train(name, *, steps):
        handle = begin(name, steps=steps)
        cluster.state = "failed"
        fault = rn.RunFault(kind="ValueError", message="no", rank=1)
        handle.hear(rn.RunView(spec=handle.spec, state="failed", target=10, fault=fault), ())
        return handle

    cluster.train = train
    with pytest.raises(errors.CellFailed, match=r"ValueError: no \(rank 1\)"):
        run(shell, "%dist_train t --wait")
    assert published[0]["data"]["text/plain"].startswith("t: failed (ValueError: no), 10 of 10")


def test_an_interrupt_of_the_wait_detaches(shell, cluster, published, monkeypatch):
    """The run is not stopped, and the line says so; where a page looks on, it saw the steps."""
    waits = []

    def wait(self, timeout):
        waits.append(timeout)
        self.refresh()
        raise TimeoutError if len(waits) < 3 else KeyboardInterrupt

    monkeypatch.setattr(Run, "wait", wait)
    monkeypatch.setattr(run_magics, "is_live", lambda _: True)
    with pytest.raises(Detached, match=r"the run goes on \(t: running, 10 of 107 steps"):
        run(shell, "%dist_train t --wait")
    assert cluster.calls == [("train", "t", 100)]
    assert [one["data"]["text/plain"] for one in published] == [
        "t: running, 10 of 107 steps, loss 0.5"
    ]


@pytest.mark.parametrize(
    ("line", "order", "shown"),
    [
        ("%dist_step", rn.SteerRun(run="r1", action="step", steps=1), "t: paused, 10 of 107"),
        ("%dist_step 5", rn.SteerRun(run="r1", action="step", steps=5), "t: paused, 10 of 107"),
        ("%dist_pause", rn.SteerRun(run="r1", action="pause"), "t: paused, 10 of 107"),
        ("%dist_resume", rn.SteerRun(run="r1", action="resume"), "t: running, 10 of 107"),
        ("%dist_stop", rn.SteerRun(run="r1", action="stop"), "t: stopped, 10 of 107"),
        ("%dist_set lr=3e-4", rn.SetRun(run="r1", lr=3e-4), "From the next step on: lr=0.0003."),
    ],
)
def test_a_run_is_driven_by_magics(shell, cluster, capsys, line, order, shown):
    """Each is one order to the current run, and says how the run stands then."""
    cluster.train("t", steps=100)
    run(shell, line)
    assert cluster.calls[1:] == [order]
    assert capsys.readouterr().out.startswith(shown)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "line", ["%dist_step", "%dist_pause", "%dist_resume", "%dist_stop", "%dist_set lr=1"]
)
def test_without_a_run_the_error_names_the_magic_that_begins_one(shell, line):
    """There is nothing to drive yet."""
    with pytest.raises(errors.WrongState, match="%dist_train"):
        run(shell, line)


def test_a_run_that_is_over_takes_no_orders(shell, cluster):
    """The supervisor's refusal goes through."""
    cluster.train("t", steps=3)
    cluster.error = errors.WrongState("the run is finished; it takes no orders any more")
    with pytest.raises(errors.WrongState, match="the run is finished"):
        run(shell, "%dist_pause")


def test_status_shows_the_last_run(shell, cluster, capsys):
    """How far it is, below the table."""
    cluster.train("t", steps=100)
    run(shell, "%dist_status")
    assert capsys.readouterr().out.splitlines()[-1] == "Run: t: running, 10 of 107 steps, loss 0.5"


@pytest.mark.parametrize("line", ["lr=3e-4", "lr = 3e-4", "lr =3e-4   # less"])
def test_a_setting_may_have_blanks_and_a_comment(shell, cluster, capsys, line):
    """All of them set the same."""
    cluster.train("t", steps=100)
    run(shell, f"%dist_set {line}")
    assert capsys.readouterr().out == "From the next step on: lr=0.0003.\n"


# ---- comments


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("0 2  # both", "0 2  "),
        ("# nothing", ""),
        ("a#b", "a#b"),
        ("-r '0 # 1' # don't", "-r '0 # 1' "),
    ],
)
def test_a_comment_ends_a_line(line, kept):
    """As in a shell: outside of quotes, after a blank."""
    assert without_comment(line) == kept


def readme_lines():
    """Each line of the README's code that begins a magic, with a body where it needs one."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if block.startswith("%%"):
            yield block
        else:
            yield from (one for one in block.splitlines() if one.startswith("%"))


@pytest.mark.parametrize("cell", sorted({*readme_lines()} - {"%load_ext nbdist"}))
def test_every_magic_of_the_readme_can_be_pasted(shell, session, cluster, cell):
    """What stands in the first thing that is read is understood, comments included."""
    if cell.startswith("%dist_init"):
        session.cluster = None
    run(shell, cell)
    assert cluster.calls or session.started or "status" in cell


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("%dist_dashboard", ("dashboard",)),
        ("%dist_dashboard loss 'sync'", ("dashboard", "loss", "sync")),
    ],
)
def test_the_dashboard_is_shown(shell, cluster, published, line, call):
    """It is opened with the named views, and shown as what it is."""
    run(shell, line)
    assert cluster.calls == [call]
    assert published[-1]["data"]["text/plain"] == "a dashboard"


# ---- wrong arguments


@pytest.mark.parametrize(
    ("cell", "error", "words"),
    [
        ("%dist_init -n 0", UsageError, "0 is not a whole number of at least 1"),
        ("%dist_init -n x", UsageError, "x is not a whole number"),
        ("%dist_init -g 0,x", UsageError, "not a list of device numbers"),
        ("%dist_init --backend mpi", UsageError, "invalid choice: 'mpi'"),
        ("%dist_init --policy hope", UsageError, "invalid choice: 'hope'"),
        ("%dist_dashboard map", UsageError, "map is none of overview, ranks"),
        ("%dist_init four", UsageError, "unrecognized arguments: four"),
        ("%dist_status now", UsageError, "unrecognized arguments: now"),
        ("%dist_scale 0", UsageError, "0 is not a whole number"),
        ("%dist_scale", UsageError, "required: N"),
        ("%dist_kill", UsageError, "required: RANK"),
        ("%dist_kill 4", errors.TargetError, "no rank 4"),
        ("%dist_kill 0 --signal HUP", UsageError, "invalid choice: 'HUP'"),
        ("%dist_slow 1", UsageError, "required: FACTOR"),
        ("%dist_save", UsageError, "required: PATH"),
        ("%dist_save a b-c", UsageError, "b-c is not a name that a variable can have"),
        ("%dist_load a b c", UsageError, "unrecognized arguments: c"),
        ("%dist_slow 1 0.5", UsageError, "0.5 is not a number of at least 1"),
        ("%dist_slow 1 inf", UsageError, "inf is not a number of at least 1"),
        ("%dist_slow 1 nan", UsageError, "nan is not a number of at least 1"),
        ("%dist_slow 1 1e400", UsageError, "1e400 is not a number of at least 1"),
        ("%dist_slow 7 2", errors.TargetError, "no rank 7"),
        ("%dist_push", UsageError, "required: NAME"),
        ("%dist_push nowhere", UsageError, "no variable 'nowhere'"),
        ("%dist_push ranks", UsageError, "'ranks' cannot be pushed"),
        ("%dist_push a.b", UsageError, "a.b is not a name"),
        ("%dist_train", UsageError, "required: NAME"),
        ("%dist_train a.b", UsageError, "a.b is not a name"),
        ("%dist_train t --steps 0", UsageError, "0 is not a whole number of at least 1"),
        ("%dist_step x", UsageError, "x is not a whole number"),
        ("%dist_set", UsageError, "required: lr=X"),
        ("%dist_set momentum=1", UsageError, "momentum=1 is not one of lr=NUMBER"),
        ("%dist_set lr", UsageError, "lr: its value is not a finite number of at least 0"),
        ("%dist_set lr=fast", UsageError, "its value is not a finite number"),
        ("%dist_set lr=-1", UsageError, "its value is not a finite number"),
        ("%dist_set lr=inf", UsageError, "its value is not a finite number"),
        ("%dist_pause now", UsageError, "unrecognized arguments: now"),
        ("%dist_pull for", UsageError, "for is not a name"),
        ("%dist_pull x -r 0,9", errors.TargetError, "no rank 9"),
        ("%%distributed -t nan\n1", UsageError, "nan is not a number of seconds above 0"),
        ("%%distributed -t 0\n1", UsageError, "0 is not a number of seconds above 0"),
        ("%%distributed -t soon\n1", UsageError, "soon is not a number of seconds"),
        ("%%distributed -o 1x\n1", UsageError, "1x is not a name"),
        ("%%distributed -r 'x\n1", UsageError, "no closing quotation"),
        ("%%distributed -r 7\n1", errors.TargetError, "no rank 7"),
        ("%%distributed --async\n1", errors.WrongState, "--async is not there yet"),
        ("%%rank\n1", UsageError, "required: RANKS"),
        ("%%rank 9\n1", errors.TargetError, "no rank 9"),
        ("%%rank[]\n1", errors.TargetError, "cannot read ''"),
        ("%%rank[0\n1", errors.TargetError, r"cannot read '\[0'"),
        ('%%rank["0"]\n1', errors.TargetError, "cannot read"),
        ("%%rank[0] -q\n1", UsageError, "unrecognized arguments: -q"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(
    shell, session, cluster, cell, error, words
):
    """The message says what is wrong, and the session is not called."""
    shell.user_ns["ranks"] = 1
    if "dist_init" in cell:
        session.cluster = None
    with pytest.raises(error, match=words):
        run(shell, cell)
    assert (cluster.calls, session.started) == ([], [])


# ---- the package


def test_importing_nbdist_does_nothing():
    """No heavy module, thread or logger comes with it, and no session."""
    code = (
        "import sys, json, threading; before = set(sys.modules); import nbdist; nbdist.CellFailed; "
        "print(json.dumps([sorted(set(sys.modules) - before), threading.active_count()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, num_threads = json.loads(done.stdout)
    ours = {name for name in loaded if name.split(".")[0] == "nbdist"}
    assert ours == {"nbdist", "nbdist._version", "nbdist.errors"}
    heavy = {"torch", "zmq", "ipyparallel", "IPython", "numpy", "asyncio", "logging", "socket"}
    assert {name.split(".")[0] for name in loaded} & heavy == set()
    assert num_threads == 1


def test_public_names_are_all_there():
    """Every name of __all__ can be had, and every error class is among them."""
    for name in nbdist.__all__:
        assert getattr(nbdist, name) is not None
    classes = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert classes <= set(nbdist.__all__) <= set(dir(nbdist))
    assert nbdist.CellResult is CellResult
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        nbdist.nothing  # noqa: B018


def test_windows_is_refused_with_a_sentence(bare_shell, monkeypatch):
    """Neither the magics nor `start` come up there."""
    monkeypatch.delitem(vars(nbdist), "start", raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(errors.StartFailed, match="does not run on Windows; use Linux"):
        nbdist.load_ipython_extension(bare_shell)
    with pytest.raises(errors.StartFailed, match="does not run on Windows; use Linux"):
        nbdist.start(2)
