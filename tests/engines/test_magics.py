"""The magics on real engines: in a shell of this process, and in a notebook that nbclient runs."""

from __future__ import annotations

import re

import nbclient
import nbformat
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import nbdist
from nbdist.processes import processes_by_rundir
from nbdist.session.start import current

RELEASED = re.compile("rank 0 was released from (barrier|a collective)")
"""Which one is only known of a rank that has waited for more than a moment."""


@pytest.fixture(scope="module")
def ipython():
    """One shell for this module, with the magics loaded."""
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    shell.run_line_magic("load_ext", "nbdist")
    yield shell
    shell.run_line_magic("unload_ext", "nbdist")
    InteractiveShell.clear_instance()


@pytest.fixture
def cell(ipython):
    """`cell(text)`: run a cell as a user would; what it showed. Raises what it raised."""

    def run(text):
        with capture_output() as captured:
            result = ipython.run_cell(text)
        result.raise_error()
        shown = [o.data.get("text/plain", "") for o in captured.outputs]
        return captured.stdout + "".join(f"{text}\n" for text in shown)

    return run


@pytest.fixture(scope="module")
def start_shared(ipython):
    """The cluster that these tests share is started by the magic."""

    def start():
        with capture_output():
            ipython.run_cell("%dist_init -n 4").raise_error()
        return current()

    return start


def table(text):
    """Rows of a printed table, as lists of words."""
    return [line.split() for line in text.splitlines() if line and line[0].isdigit()]


@pytest.mark.usefixtures("alone")
def test_init(cell):
    """`%dist_init` starts the engines and lists them; a second one changes nothing;
    `%dist_shutdown` ends them."""
    text = cell("%dist_init -n 2 -v")
    assert text.split("\n")[0].split() == ["rank", "slot", "device", "host", "pid"]
    engines = current()
    assert [row[:3] for row in table(text)] == [["0", "0", "cpu"], ["1", "1", "cpu"]]
    assert [int(row[-1]) for row in table(text)] == [s.pid for s in engines.status()]
    assert "Already running" in cell("%dist_init -n 4")
    assert current() is engines
    assert engines.world_size == 2
    path = engines._rundir.path
    assert "ended" in cell("%dist_shutdown")
    assert path not in processes_by_rundir()
    with pytest.raises(nbdist.NotStarted, match="dist_init"):
        cell("%%distributed\nrank")
    assert "No cluster" in cell("%dist_reset")


@pytest.mark.usefixtures("alone")
def test_kill_of_all(cell):
    """After the loss of all engines the notebook is usable: `%dist_reset` and `%dist_init` start
    anew."""
    cell("%dist_init -n 2")
    cell("%dist_kill all")
    with pytest.raises(nbdist.RecoveryFailed, match="dist_reset"):
        current().wait_healthy(timeout=10)
    with pytest.raises(nbdist.RecoveryFailed, match="dist_reset"):
        cell("%%distributed\nrank")
    for line in ("%dist_kill 5", "%dist_slow 0 2", "%dist_scale 2"):
        with pytest.raises(nbdist.RecoveryFailed, match="dist_reset"):
            cell(line)
    cell("%dist_reset")
    cell("%dist_init -n 2")
    assert cell("%%distributed\nrank + world_size") == "[rank 0]\n2\n[rank 1]\n3\n"
    cell("%dist_reset")


@pytest.mark.usefixtures("four")
def test_cells(cell, ipython):
    """`%%distributed` and `%%rank[…]` run a cell and show its output by rank, equal output once."""
    folded = "[ranks 0-1]\nsame\n0\n[ranks 2-3]\nsame\n1\n"
    assert cell("%%distributed\nprint('same')\nrank // 2") == folded
    assert cell("%%rank[0,2]\nprint(rank * 10)") == "[rank 0]\n0\n[rank 2]\n20\n"
    assert cell("%%rank[!1]\nrank > 5") == "[ranks 0,2-3]\nFalse\n"
    assert cell("%%distributed -r 1-2 -o got\nx = rank; x") == "[rank 1]\n1\n[rank 2]\n2\n"
    assert ipython.user_ns["got"].values == {1: 1, 2: 2}
    assert cell("%%distributed\ny = rank") == ""
    with pytest.raises(nbdist.TargetError, match="7"):
        cell("%%rank[7]\nrank")
    with pytest.raises(SyntaxError):
        cell("%%distributed\nx ===== 1")
    assert "Barrier passed" in cell("%sync")


@pytest.mark.usefixtures("four")
def test_ipython_syntax(cell):
    """Shell lines, magics and `await` work inside a distributed cell."""
    assert cell("%%distributed\n!echo hello") == "[ranks 0-3]\nhello\n"
    assert "Wall time" in cell("%%distributed -r 0\n%time 1 + 1")
    assert cell("%%distributed\nimport asyncio\nawait asyncio.sleep(0, 5)") == "[ranks 0-3]\n5\n"


@pytest.mark.usefixtures("four")
def test_failing_cell(cell, ipython):
    """A cell that fails on one rank fails with that engine's own traceback, and the next one
    works."""
    with pytest.raises(nbdist.CellFailed):
        cell("%%distributed\nif rank == 1:\n    1 / 0\ndist.barrier()")
    with capture_output() as captured:
        ipython.run_cell("%%distributed\nif rank == 1:\n    1 / 0  # here\ndist.barrier()")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", captured.stdout + captured.stderr)
    assert "1 / 0  # here" in shown
    assert "ZeroDivisionError" in shown
    assert "On rank 1" in shown
    assert RELEASED.search(shown)
    assert "session/cells.py" not in shown
    assert cell("%%distributed\nworld_size") == "[ranks 0-3]\n4\n"


@pytest.mark.usefixtures("four")
def test_push_and_pull(cell, ipython):
    """Values go to the engines and come back; a name of the notebook is not overwritten unless
    asked."""
    ipython.user_ns["lr"] = 0.5
    assert "lr" in cell("%dist_push lr")
    assert cell("%%distributed\nlr") == "[ranks 0-3]\n0.5\n"
    cell("%%distributed\nz = rank + 1")
    cell("%dist_pull z")
    assert ipython.user_ns["z"] == {0: 1, 1: 2, 2: 3, 3: 4}
    with pytest.raises(UsageError, match="-f"):
        cell("%dist_pull z")
    cell("%dist_pull z -r 2 -f")
    assert ipython.user_ns["z"] == 3
    with pytest.raises(UsageError, match="no_such"):
        cell("%dist_push no_such")


def test_kill_status_and_scale(four, cell):
    """`%dist_kill` takes an engine down; `%dist_status` shows that it came back; `%dist_scale`
    changes the world."""
    cell("%%distributed\nx = rank * 11")
    generation = four.generation
    assert "Sent KILL to rank 1" in cell("%dist_kill 1")
    four.wait_healthy(after=generation)
    text = cell("%dist_status")
    assert [(row[0], row[1], row[2]) for row in table(text)] == [
        (str(r), str(r), "member") for r in range(4)
    ]
    assert "1 lost" in text
    assert "1 joined" in text
    assert cell("%%distributed\nx") == "".join(f"[rank {r}]\n{11 * r}\n" for r in range(4))
    assert "ranks 0-1" in cell("%dist_scale 2")
    assert four.world_size == 2
    assert "ranks 0-3" in cell("%dist_scale 4")


SMALL = """%%distributed
import torch
from nbdist.train import Trainer, bench_model
from torch.utils.data import TensorDataset
generator = torch.Generator().manual_seed(1)
trainer = Trainer(
    model=bench_model, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), global_batch=16,
    loss=torch.nn.functional.mse_loss,
    data=TensorDataset(torch.randn(64, 64, generator=generator), torch.zeros(64, 10)),
)
"""


@pytest.mark.usefixtures("four")
def test_save_and_load(cell, tmp_path):
    """`%dist_save` and `%dist_load` say how far the trainer is; what is wrong is one sentence."""
    cell(SMALL)
    cell("%dist_train trainer --steps 4 --wait")
    said = cell(f"%dist_save {tmp_path}/runs")
    assert re.fullmatch(
        rf"Saved trainer at step 4 in {tmp_path}/runs: [\d.]+ MB, whole and on disk\.\n", said
    )
    cell("%dist_train trainer --steps 3 --wait")
    assert cell(f"%dist_load {tmp_path}/runs trainer") == (
        f"Loaded {tmp_path}/runs: trainer stands at step 4.\n"
    )
    assert set(current().run("trainer.step", once=True).values.values()) == {4}
    with pytest.raises(nbdist.CheckpointUnreadable, match=f"{tmp_path}/other does not exist"):
        cell(f"%dist_load {tmp_path}/other")
    cell(SMALL.replace("SGD(named, lr=0.1)", "AdamW(named)"))
    with pytest.raises(nbdist.CheckpointUnreadable, match="state of SGD, and the optimizer is Ada"):
        cell(f"%dist_load {tmp_path}/runs")


@pytest.mark.usefixtures("four")
def test_mode(cell):
    """In `%dist_mode` plain cells run on the engines, and magics where they did."""
    cell("%dist_mode -e")
    try:
        assert cell("of_mode = rank // 2\nof_mode") == "[ranks 0-1]\n0\n[ranks 2-3]\n1\n"
        assert cell("%%rank[3]\nof_mode") == "[rank 3]\n1\n"
    finally:
        cell("%dist_mode -d")
    with pytest.raises(NameError):
        cell("of_mode")


def rows_of_variables(text):
    """Name -> the row that `%dist_vars` shows of it."""
    return {line.split()[0]: line for line in text.splitlines()[1:]}


def test_variables(four, cell, until):
    """`%dist_vars` compares what ranks hold, also between the steps of a run, and changes
    nothing."""
    cell(
        "%%distributed\nimport threading\nsame = torch.ones(3)\nother = torch.ones(3) * rank\n"
        "lock = {'a': threading.Lock()}\n_private = 1"
    )
    names = "sorted(name for name in globals() if name[0] != '_')"
    before = four.run(names, once=True).values
    rows = rows_of_variables(cell("%dist_vars same other lock"))
    assert rows["same"].split() == ["same", "Tensor", "(3,)", "float32", "cpu", "yes"]
    far = "rank 3 by up to 3, rank 2 by up to 2, rank 1 by up to 1 unlike rank 0"
    assert rows["other"].endswith(far)
    assert "at fault: lock['a'] (a lock)" in rows["lock"]
    with pytest.raises(nbdist.CellFailed, match=r"at fault: lock\['a'\] \(a lock\)"):
        cell("%dist_pull lock")
    with pytest.raises(ValueError, match="no rank has a variable rank"):
        cell("%dist_vars rank")
    assert four.run(names, once=True).values == before
    cell(SMALL)
    run = four.train("trainer", steps=10**6)
    try:
        until(lambda: run.num_committed > 1, 60, lambda: f"steps: {run}")
        rows = rows_of_variables(cell("%dist_vars"))
    finally:
        run.stop()
    assert {"same", "other", "lock", "trainer"} <= {*rows}
    assert not {"_private", "rank", "dist"} & {*rows}
    assert " yes " in rows["trainer"]


def test_unload(four, ipython, cell):
    """Taking the magics away leaves the cluster running, and loading them again finds it."""
    ipython.run_line_magic("unload_ext", "nbdist")
    try:
        assert ipython.find_cell_magic("distributed") is None
        assert four.run("rank").values == {0: 0, 1: 1, 2: 2, 3: 3}
    finally:
        ipython.run_line_magic("load_ext", "nbdist")
    assert cell("%%rank[0]\nrank") == "[rank 0]\n0\n"


NOTEBOOK = [
    "%load_ext nbdist\n%dist_init -n 2",
    "%%distributed\nimport time\nprint('hello from', rank)\ntime.sleep(0.3)\n"
    "print('bye')\nworld_size",
    "%%rank[1]\nx = torch.ones(2) * rank\nx",
    "%dist_pull x -r 1\nx.tolist()",
    "%%distributed\nif rank == 1:\n    raise ValueError('on purpose')\ndist.barrier()",
    "from nbdist.session.start import current\ngeneration = current().generation\n%dist_kill 0",
    "current().wait_healthy(after=generation)",
    "%%distributed\nt = torch.tensor([rank + 1]); dist.all_reduce(t); int(t)",
    "%%distributed -r 0\nimport os\nprint('last words', flush=True)\nos.kill(os.getpid(), 9)",
    "%dist_shutdown",
]


COMPATIBLE = [
    "%load_ext nbdist.compat",
    "%dist_init -n 2",
    "import torch\nimport torch.distributed as dist\n"
    "print(f'Rank {rank} of {world_size} on {device}, GPU {gpu_id}')",
    "# on all ranks\nx = torch.full((2,), float(rank + 1)).to(device)\ndist.all_reduce(x)\nx",
    "%%rank[0]\nmodel = torch.nn.Linear(2, 2)\nsum(p.numel() for p in model.parameters())",
    "%%rank [0,1]\nrank * 10",
    "%%distributed\nrank + 1",
    "%sync",
    "%dist_status",
    "%dist_mode --disable",
    "here = 'in the notebook'\nhere",
    "%dist_mode --enable",
    "world_size",
    "%dist_shutdown",
]


def execute(cells):
    """Cells of a notebook after nbclient has run them, headless."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        notebook, timeout=60, kernel_name="python3", allow_errors=True
    ).execute()
    return notebook.cells


@pytest.fixture(scope="module")
def executed():
    """The notebook's cells."""
    return execute(NOTEBOOK)


def text_of(cell):
    """What a cell shows, as text without colours."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.append("\n".join(output.traceback))
        else:
            parts.append(output.data["text/plain"] + "\n")
    return re.sub(r"\x1b\[[0-9;]*m", "", "".join(parts))


@pytest.mark.usefixtures("alone")
def test_headless_notebook(executed):
    """In a notebook without a front end each cell has one display, in rank order, folded; failures
    are errors."""
    texts = [text_of(cell) for cell in executed]
    assert [row[:3] for row in table(texts[0])] == [["0", "0", "cpu"], ["1", "1", "cpu"]]
    assert texts[1] == "[rank 0]\nhello from 0\nbye\n2\n[rank 1]\nhello from 1\nbye\n2\n"
    assert len(executed[1].outputs) == 1
    assert texts[2] == "[rank 1]\ntensor([1., 1.])\n"
    assert texts[3].endswith("[1.0, 1.0]\n")
    assert "Sent KILL to rank 0" in texts[5]
    assert texts[7] == "[ranks 0-1]\n3\n"
    assert texts[9] == "The cluster has ended.\n"
    fails = [i for i, c in enumerate(executed) if any(o.output_type == "error" for o in c.outputs)]
    assert fails == [4, 8]


@pytest.mark.usefixtures("alone")
def test_headless_failures(executed):
    """There the cause leads, and the engine's traceback or last words are shown, and none of the
    kernel's frames."""
    raised, died = text_of(executed[4]), text_of(executed[8])
    assert "ValueError: on purpose" in raised
    assert "raise ValueError('on purpose')" in raised
    assert RELEASED.search(raised)
    assert "SIGKILL" in died
    assert "last words" in died
    assert "session/cells.py" not in raised + died
    assert {o.ename for i in (4, 8) for o in executed[i].outputs if o.output_type == "error"} == {
        "CellFailed",
        "EngineDied",
    }


@pytest.mark.usefixtures("alone")
def test_notebook_of_another_package():
    """A notebook in the style of nbdistributed runs with its load line changed."""
    cells = execute(COMPATIBLE)
    assert not [cell for cell in cells if any(o.output_type == "error" for o in cell.outputs)]
    texts = [text_of(cell) for cell in cells]
    assert "Plain cells run on all ranks" in texts[1]
    ranks = [f"[rank {rank}]\nRank {rank} of 2 on cpu, GPU None\n" for rank in range(2)]
    assert texts[2] == "".join(ranks)
    assert texts[3] == "[ranks 0-1]\ntensor([3., 3.])\n"
    assert texts[4] == "[rank 0]\n6\n"
    assert texts[5] == "[rank 0]\n0\n[rank 1]\n10\n"
    assert texts[6] == "[rank 0]\n1\n[rank 1]\n2\n"
    assert texts[7] == "Barrier passed by ranks 0-1.\n"
    assert len(table(texts[8])) == 2
    assert texts[10] == "'in the notebook'\n"
    assert texts[12] == "[ranks 0-1]\n2\n"
    assert texts[13] == "The cluster has ended.\nPlain cells run in the notebook.\n"
