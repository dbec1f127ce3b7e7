"""The command line: what it lists, what it ends and what it leaves alone."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from nbdist import processes
from nbdist.cli import (
    _COMMANDS,
    build_parser,
    clean,
    doctor,
    installed,
    lab,
    machine,
    main,
    table,
)
from nbdist.cli.clusters import find_clusters
from nbdist.cli.findings import Finding
from nbdist.config import ClusterConfig
from nbdist.gpus import Gpus
from nbdist.processes import RUNDIR_VARIABLE, rundir_in, rundir_of
from nbdist.rundir import Owner, RunDir, runtime_root

GONE = Owner(pid=os.getpid(), created=0.0)  # our pid, but another process's birthday
SLEEP = "import time; time.sleep(60)"


@pytest.fixture(autouse=True)
def root(monkeypatch):
    """A folder of our own for run directories; the real one is never looked at."""
    folder = tempfile.mkdtemp(prefix="nb-", dir="/tmp")  # short: sockets
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    monkeypatch.delenv(RUNDIR_VARIABLE, raising=False)
    assert runtime_root() == Path(folder) / "nbdist"
    yield runtime_root()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def sleeper():
    """Starts harmless processes with any words on their command line, and ends them."""
    started = []

    def start(*words, program="-c", env=None):
        command = [sys.executable, *(["-c", SLEEP] if program == "-c" else [program]), *words]
        process = subprocess.Popen(command, env={**os.environ, **(env or {})})
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def ours(sleeper):
    """Starts a stand-in for one of a cluster's processes."""
    return lambda path, module="supervisor.zygote": sleeper("-m", f"nbdist.{module}", str(path))


def make_cluster(owner=None, **settings):
    return RunDir.create(ClusterConfig(num_engines=1, **settings), owner or Owner.this())


def grow_old(rundir, seconds=3600):
    for path in (rundir.file("cluster.json"), rundir.path):
        if path.exists():
            stamp = path.stat().st_mtime - seconds
            os.utime(path, (stamp, stamp))


def is_running(process):
    return process.poll() is None


# ---- the parser


def test_every_command_has_its_docstring_as_help(capsys):
    """`nbdist COMMAND --help` shows the module's docstring, `nbdist --help` its first line."""
    words = build_parser().format_help().split()
    for name in _COMMANDS:
        module = __import__(f"nbdist.cli.{name}", fromlist=["run"])
        first = module.__doc__.partition("\n")[0]
        assert " ".join(first.split()[:3]) in " ".join(words)
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert first in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["demo", "-n", "1"], ["ps", "--nonsense"]])
def test_what_makes_no_sense_ends_with_2(argv):
    """argparse's own exit code."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2


def test_help_loads_neither_torch_nor_ipyparallel():
    """The command line stays light until a command needs more."""
    code = (
        "import sys, contextlib\nfrom nbdist.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "assert not {'torch', 'ipyparallel', 'IPython', 'numpy'} & set(sys.modules)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True)


def test_our_errors_are_a_line_and_not_a_traceback(capsys, root):
    """A folder that others may enter is refused with the reason, and exit code 1."""
    root.chmod(0o755)
    assert main(["ps"]) == 1
    assert "nbdist ps: PermissionError:" in capsys.readouterr().err
    root.chmod(0o700)


# ---- whose process it is


@pytest.mark.parametrize(
    ("words", "is_ours"),
    [
        (["python", "-m", "nbdist.supervisor", "{root}/ab"], True),
        (["python", "-u", "-m", "nbdist.engine", "{root}/ab", "3", "1"], True),
        (["python", "-m", "nbdist.supervisor.zygote", "--flag", "{root}/ab"], True),
        (["python", "-m", "nbdist.supervisor", "{root}/ab/logs"], False),
        (["python", "-m", "nbdist.supervisor", "/elsewhere/ab"], False),
        (["python", "-m", "nbdistant", "{root}/ab"], False),
        (["python", "worker.py", "{root}/ab"], False),
        (["tail", "-f", "{root}/ab/logs/slot-0.log"], False),
        (["python", "-m", "nbdist.supervisor"], False),
        (["-m"], False),
        ([], False),
    ],
)
def test_a_command_line_belongs_to_a_cluster_only_if_it_is_one_of_ours(root, words, is_ours):
    """A module of ours and the exact directory; naming it is not enough."""
    found = rundir_of([word.format(root=root) for word in words], root)
    assert found == (root / "ab" if is_ours else None)


def test_an_environment_belongs_to_a_cluster_only_by_our_variable(root):
    """Another variable with the same value does not count, nor does another folder."""
    assert rundir_in({RUNDIR_VARIABLE: f"{root}/ab"}, root) == root / "ab"
    assert rundir_in({"PWD": f"{root}/ab"}, root) is None
    assert rundir_in({RUNDIR_VARIABLE: "/elsewhere/ab"}, root) is None
    assert rundir_in({}, root) is None


# ---- ps


def test_ps_lists_clusters_with_owner_and_processes(ours, capsys):
    """One line a cluster: whose it is, whether that lives, and how many processes it has."""
    owned, left = make_cluster(), make_cluster(GONE)
    supervisor = ours(owned.path, "supervisor")
    ours(owned.path)
    assert main(["ps"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert f"{os.getpid()} (alive)" in lines[owned.cluster_id]
    assert f" {supervisor.pid} " in lines[owned.cluster_id]
    assert str(owned.path / "logs") in lines[owned.cluster_id]
    assert f"left over  {os.getpid()} (gone)" in lines[left.cluster_id]


def test_ps_for_programs(ours, capsys):
    """The same facts as JSON, with pids."""
    rundir = make_cluster(GONE, keep=True)
    grow_old(rundir)
    supervisor = ours(rundir.path, "supervisor")
    assert main(["ps", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    age_s = entry.pop("age_s")
    assert 3600 <= age_s < 3700
    assert entry == {
        "id": rundir.cluster_id,
        "state": "kept",
        "owner_pid": GONE.pid,
        "owner_is_alive": False,
        "supervisor_pid": supervisor.pid,
        "pids": [supervisor.pid],
        "logs": str(rundir.path / "logs"),
        "problem": "",
    }


def test_ps_says_that_there_are_none(capsys):
    """An empty list is a sentence, or an empty JSON list."""
    assert main(["ps"]) == 0
    assert main(["ps", "--json"]) == 0
    assert capsys.readouterr().out == "no clusters\n[]\n"


# ---- clean


def test_clean_ends_exactly_the_processes_of_a_cluster_without_owner(
    ours, sleeper, tmp_path, capsys
):
    """Ours are killed and the folder goes; foreign processes that name it, or us, live on."""
    rundir = make_cluster(GONE)
    worker = tmp_path / "worker.py"
    worker.write_text(SLEEP)
    path = str(rundir.path)
    foreign = [
        sleeper(program=str(worker)),
        sleeper(path, program=str(worker)),
        sleeper(str(rundir.log("slot-0"))),
        sleeper("-m", "nbdist.supervisor.zygote", str(tmp_path / rundir.cluster_id)),
        sleeper(env={"PWD": path}),
    ]
    mine = [ours(path, "supervisor"), ours(path), ours(path), sleeper(env={RUNDIR_VARIABLE: path})]
    assert main(["clean"]) == 0
    out = capsys.readouterr().out
    assert "is gone; ended 4 processes" in out
    assert "removed its folder" in out
    assert all(str(process.pid) in out for process in mine)
    assert [is_running(process) for process in mine] == [False] * 4
    assert [is_running(process) for process in foreign] == [True] * 5
    assert not rundir.path.exists()
    assert main(["clean"]) == 0
    assert capsys.readouterr().out == "nothing to clean\n"


def test_clean_leaves_a_cluster_whose_owner_is_alive(ours, capsys):
    """Its processes and folder stay, and it says why."""
    rundir = make_cluster()
    engine = ours(rundir.path)
    assert main(["clean", "--all-kept"]) == 0
    assert f"left alone: its owner (pid {os.getpid()}) is alive" in capsys.readouterr().out
    assert is_running(engine)
    assert rundir.path.exists()


def test_clean_ends_one_cluster_and_leaves_its_neighbour(ours):
    """What is left over of one is never looked for in another."""
    left, owned = make_cluster(GONE), make_cluster()
    victim, bystander = ours(left.path), ours(owned.path)
    assert main(["clean"]) == 0
    assert (is_running(victim), is_running(bystander)) == (False, True)
    assert (left.path.exists(), owned.path.exists()) == (False, True)


def test_clean_leaves_kept_clusters_unless_asked(ours, capsys):
    """A kept cluster outlives its kernel on purpose."""
    rundir = make_cluster(GONE, keep=True)
    engine = ours(rundir.path)
    assert main(["clean"]) == 0
    assert "--all-kept" in capsys.readouterr().out
    assert is_running(engine)
    assert main(["clean", "--all-kept"]) == 0
    assert not is_running(engine)
    assert not rundir.path.exists()


def test_clean_removes_an_unreadable_folder_only_if_it_is_old_and_empty_of_processes(ours, capsys):
    """A young one may be starting; one with processes may belong to somebody."""
    young, old, busy, foreign = (make_cluster() for _ in range(4))
    for rundir in (young, old):
        rundir.file("cluster.json").unlink()
    for rundir, text in ((busy, '{"config"'), (foreign, '{"config": {"num_engines": 1}}')):
        rundir.file("cluster.json").write_text(text)
    for rundir in (old, busy, foreign):
        grow_old(rundir)
    engine = ours(busy.path)
    assert main(["clean"]) == 0
    assert [r.path.exists() for r in (young, old, busy, foreign)] == [True, False, True, False]
    assert is_running(engine)
    out = capsys.readouterr().out
    assert f"{young.cluster_id}: left alone: it is 0 s old and may be just starting" in out
    assert f"{busy.cluster_id}: left alone: cluster.json does not tell its owner" in out


def test_clean_ends_processes_whose_folder_is_gone(ours, monkeypatch, capsys):
    """Such a cluster has ended: its lease cannot be renewed. One that ends meanwhile is no news."""
    monkeypatch.setattr(clean, "_ENDING_S", 0.0)
    rundir = make_cluster()
    engine = ours(rundir.path)
    rundir.remove()
    assert [cluster.state for cluster in find_clusters()] == ["without folder"]
    assert main(["clean"]) == 0
    assert "its folder is gone; ended 1 process " in capsys.readouterr().out
    assert not is_running(engine)


def test_clean_says_what_it_could_not_end(ours, monkeypatch, capsys):
    """Exit code 1, the pids, and the folder is kept, so that the next call finds them."""
    rundir = make_cluster(GONE)
    engine = ours(rundir.path)
    monkeypatch.setattr(processes.psutil.Process, "kill", lambda _self: None)
    monkeypatch.setattr(processes, "_ROUND_S", 0.05)
    monkeypatch.setattr(
        clean, "end_processes", lambda path: processes.end_processes(path, timeout_s=0.1)
    )
    assert main(["clean"]) == 1
    assert f"FAILED to end 1 process (pid {engine.pid})" in capsys.readouterr().out
    assert rundir.path.exists()


# ---- doctor


def test_doctor_reports_and_fails_only_on_failures(monkeypatch, capsys):
    """A line for each finding, its next step below it; the exit code says whether one failed."""
    found = [
        Finding(name="one", level="ok", text="fine"),
        Finding(name="two", level="warn", text="slow", next_step="do that"),
    ]
    monkeypatch.setattr(doctor, "findings", lambda: iter(found))
    assert main(["doctor"]) == 0
    assert "→ do that" in capsys.readouterr().out
    found.append(Finding(name="three", level="fail", text="broken", next_step="mend it"))
    assert main(["doctor", "--json"]) == 1
    assert [f["level"] for f in json.loads(capsys.readouterr().out)] == ["ok", "warn", "fail"]


def test_doctor_finds_everything_on_this_machine(monkeypatch):
    """Every finding but an "ok" one has a next step; torch is not loaded for it."""
    monkeypatch.setattr(installed, "ask_torch", lambda: installed.TorchBuild(problem="not asked"))
    found = list(doctor.findings())
    wanted = {"system", "pidfd", "packages", "cores", "memory", "runtime", "sockets"}
    wanted |= {"/dev/shm", "open files", "loopback", "gloo", "leftovers", "torch", "gpus"}
    assert {finding.name for finding in found} >= wanted
    assert all(finding.next_step for finding in found if finding.level != "ok")


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (machine.system("linux", {}), "ok"),
        (machine.system("linux", {"NBDIST_NO_FORK": "1"}), "warn"),
        (machine.system("darwin", {}), "warn"),
        (machine.memory(2**40), "ok"),
        (machine.memory(2**20), "warn"),
        (machine.open_files(resource.RLIM_INFINITY), "ok"),
        (machine.open_files(65536), "ok"),
        (machine.open_files(512), "warn"),
        (machine.open_files(64), "fail"),
        (machine.gloo_interface(None, ["lo"]), "ok"),
        (machine.gloo_interface("lo", ["lo"]), "ok"),
        (machine.gloo_interface("eth0", ["lo", "eth0"]), "ok"),
        (machine.gloo_interface("^lo", ["lo", "eth0"]), "warn"),
        (machine.gloo_interface("", ["lo"]), "warn"),
        (machine.shared_memory(Path("/nowhere")), "warn"),
        (installed.torch_build(installed.TorchBuild(version="2.13.0", gloo=True)), "ok"),
        (installed.torch_build(installed.TorchBuild(version="2.13.0")), "fail"),
        (installed.torch_build(installed.TorchBuild(problem="no such module")), "fail"),
    ],
)
def test_findings_are_judged(finding, level):
    """Each level where it belongs, and a next step wherever it is not ok."""
    assert finding.level == level
    assert bool(finding.next_step) == (level != "ok")


@pytest.mark.parametrize(
    ("gpus", "build", "level"),
    [
        (Gpus(reason="no NVIDIA device"), installed.TorchBuild(), "ok"),
        (Gpus(reason="nvidia-ml-py is not installed, so …"), installed.TorchBuild(), "warn"),
        (Gpus(names=("0",)), installed.TorchBuild(cuda="13.0", nccl=True), "ok"),
        (Gpus(names=("0",)), installed.TorchBuild(cuda="13.0"), "warn"),
        (Gpus(names=("0",)), installed.TorchBuild(), "warn"),
    ],
)
def test_gpus_need_a_build_of_torch_that_can_use_them(gpus, build, level):
    """A GPU without CUDA or NCCL in torch is worth a warning; no GPU is not."""
    assert installed.gpu_finding(gpus, build).level == level


def test_packages_are_compared_with_their_bounds():
    """Missing fails, out of bounds warns, and all well is one line."""
    required = [Requirement("ipykernel>=6.29,<8"), Requirement("ipyparallel>=9.2,<10")]

    def judge(**versions):
        return [f.level for f in installed.package_versions(required, versions)]

    assert judge(ipykernel="7.1", ipyparallel="9.2.0") == ["ok"]
    assert judge(ipykernel="8.0", ipyparallel="9.2.0") == ["warn"]
    assert judge(ipykernel=None, ipyparallel="8.0") == ["fail", "warn"]


def test_a_package_without_metadata_has_no_bounds():
    """A checkout that is not installed says so."""
    (finding,) = installed.packages("nbdist-that-is-not-there")
    assert finding.level == "warn"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import nonsense_of_ours", "ModuleNotFoundError: No module named 'nonsense_of_ours'"),
        ("import os; os._exit(3)", "exit code 3"),
        ("import time; time.sleep(30)", "longer than"),
        ("print('noise'); print('{\"version\": \"1\"}')", ""),
    ],
)
def test_torch_is_asked_in_a_process_of_its_own(code, problem):
    """What goes wrong there is a finding, not a crash."""
    timeout_s = 0.5 if "sleep" in code else 5.0
    assert problem in installed.ask_torch(code, timeout_s=timeout_s).problem


def test_a_runtime_folder_of_others_fails_and_one_passed_over_warns(root):
    """It holds keys; and clusters are found by it."""
    assert [f.level for f in machine.runtime_folder({})] == ["ok", "ok"]
    assert [f.level for f in machine.runtime_folder({"XDG_RUNTIME_DIR": "/x"})] == ["warn", "ok"]
    root.chmod(0o750)
    assert [f.level for f in machine.runtime_folder({})] == ["fail"]
    root.chmod(0o700)


def test_sockets_need_a_short_path():
    """One byte too many is a failure with the numbers in it."""
    finding = machine.unix_socket(Path("/tmp") / ("x" * 100))
    assert finding.level == "fail"
    assert "of 107 bytes" in finding.text


def test_leftovers_are_counted_and_kept_clusters_are_none(ours):
    """The next step is `nbdist clean`."""
    make_cluster()
    make_cluster(GONE, keep=True)
    assert doctor.judge_leftovers(find_clusters()).level == "ok"
    left = make_cluster(GONE)
    ours(left.path)
    finding = doctor.judge_leftovers(find_clusters())
    assert finding.level == "warn"
    assert finding.text == f"{left.cluster_id}, with 1 processes"
    assert finding.next_step == "nbdist clean"


# ---- lab


def test_lab_allows_root_only_to_root():
    """And passes on what stands after the dashes, last, so that it wins."""
    plain = lab.command(Path("notebooks"), ["--no-browser"], is_root=False)
    assert plain[1:] == ["-m", "jupyterlab", "notebooks", "--no-browser"]
    assert lab.command(Path("n"), [], is_root=True)[-1] == "--allow-root"
    assert lab.command(Path("n"), ["--allow-root"], is_root=True).count("--allow-root") == 1


def test_lab_becomes_jupyterlab(monkeypatch, tmp_path):
    """It opens the first notebook of this folder's, with the options given."""
    (tmp_path / "notebooks").mkdir()
    for name in ("02_b.ipynb", "01_a.ipynb"):
        (tmp_path / "notebooks" / name).touch()
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(lab.os, "execv", lambda _path, words: seen.append(words))
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    options = build_parser().parse_args(["lab", "--", "--port=9", "--no-browser"])
    lab.run(options)
    first = str(tmp_path / "notebooks" / "01_a.ipynb")
    assert seen == [[sys.executable, "-m", "jupyterlab", first, "--port=9", "--no-browser"]]


def test_lab_finds_a_place_anywhere(monkeypatch, tmp_path):
    """Without notebooks here, the checkout's first one or this folder."""
    monkeypatch.chdir(tmp_path)
    tutorial = Path(lab.nbdist.__file__).parents[1] / "notebooks" / "01_first_run.ipynb"
    assert lab.first_tutorial() == (tutorial if tutorial.exists() else tmp_path)


# ---- text


def test_columns_are_aligned():
    """Numbers to the right, words to the left, nothing trails."""
    text = table.columns(("id", "num"), [("a", 1), ("bcd", 23)], indent=" ")
    assert text.splitlines() == [" id   num", " a      1", " bcd   23"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (119, "119 s"), (300, "5 min"), (9000, "2.5 h"), (200000, "2.3 d")],
)
def test_durations_have_the_unit_that_fits(seconds, text):
    """Two or three digits are enough."""
    assert table.duration(seconds) == text


def test_an_absent_duration_is_a_dash():
    """None is not 0 ms."""
    assert (table.milliseconds(None), table.milliseconds(0.0204)) == ("–", "20")


def test_a_column_of_numbers_may_have_holes():
    """A dash among numbers stands with them, to the right."""
    text = table.columns(("cause", "ms"), [("user", "1,234"), ("–", "–")])
    assert text.splitlines() == ["cause     ms", "user   1,234", "–          –"]


def test_a_tutorial_that_is_signed_is_trusted(monkeypatch, tmp_path):
    """JupyterLab shows live views in it, also after the page was loaded again."""
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    path = tmp_path / "a.ipynb"
    output = nbformat.v4.new_output("display_data", {"text/html": "<b>shown</b>"})
    cell = nbformat.v4.new_code_cell("1", outputs=[output])
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    notary = pytest.importorskip("nbformat.sign").NotebookNotary
    assert not notary().check_signature(nbformat.read(path, as_version=4))
    assert lab.sign(path)
    assert notary().check_signature(nbformat.read(path, as_version=4))


def test_only_our_own_tutorial_is_signed(monkeypatch, tmp_path):
    """A notebook of the user's folder is opened as it is."""
    signed = []
    monkeypatch.setattr(lab, "sign", signed.append)
    monkeypatch.setattr(lab.os, "execv", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    theirs = tmp_path / "notebooks" / "theirs.ipynb"
    theirs.write_text("{}")
    options = build_parser().parse_args(["lab"])
    lab.run(options)
    assert signed == []
    monkeypatch.setattr(lab, "CHECKOUT", tmp_path)
    lab.run(options)
    assert signed == [theirs]
