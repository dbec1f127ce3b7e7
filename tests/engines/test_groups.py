"""Process groups when an engine is lost: all are cut and nothing else is, old ones say so, DDP
trains on."""

from __future__ import annotations

import os
import time

import psutil
import pytest

import nbdist
from nbdist.processes import processes_by_rundir

RANKS = [0, 1, 2, 3]
CELL_ENDS_S = 4 * 0.3
LATE_S = 4.0
"""More than the time in which a group must be formed."""
SUM = "t = torch.tensor([rank + 1]); dist.all_reduce(t); int(t)"
SUBGROUP = "sub = dist.new_group([1, 2])"
MESH = """
from torch.distributed.device_mesh import init_device_mesh
import torch.distributed._functional_collectives as fc
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
"""


def check_gone(engines, code, ranks, *words):
    """Code on these ranks raises `GroupGone` on each of them at once, with advice."""
    begun = time.monotonic()
    with pytest.raises(nbdist.CellFailed, match="GroupGone") as failed:
        engines.run(code, ranks=ranks)
    assert time.monotonic() - begun < CELL_ENDS_S
    assert {r: e.ename for r, e in failed.value.errors.items()} == dict.fromkeys(ranks, "GroupGone")
    for error in failed.value.errors.values():
        assert all(word in error.evalue for word in ("again", *words)), error.evalue


def test_subgroup(four, lose, heal):
    """A rank that dies inside a user's own group frees the other one there; the old group says how
    to make it again."""
    four.run(SUBGROUP)
    assert four.run("t = torch.ones(1); dist.all_reduce(t, group=sub); int(t)", ranks=[1, 2]).values
    loss = lose(
        four, 1, collective="if rank == 2: dist.all_reduce(torch.ones(1), group=sub)", waiting=[2]
    )
    assert loss.cell_ended_s <= CELL_ENDS_S
    assert any(n.startswith("rank 2 was released from all_reduce") for n in loss.error.notes)
    heal(four, loss)
    check_gone(four, "dist.all_reduce(torch.ones(1), group=sub)", [1, 2], "new_group")
    check_gone(four, "dist.get_rank(sub)", [1, 2], "new_group")
    check_gone(four, "dist.get_world_size(sub)", [1, 2], "new_group")
    check_gone(four, "dist.barrier(sub)", [1, 2], "new_group")
    check_gone(four, "dist.send(torch.ones(1), 1, group=sub)", [2], "new_group")
    check_gone(four, "dist.all_gather_object([None] * 2, 1, group=sub)", [1, 2], "new_group")
    four.run(SUBGROUP)
    code = "t = torch.ones(1); dist.all_reduce(t, group=sub); int(t)"
    assert four.run(code, ranks=[1, 2]).values == {1: 2, 2: 2}


def test_group_gone_can_be_caught(four):
    """In a cell, `GroupGone` is an error like any other: user code can catch it and make the group
    again."""
    four.run("own = dist.new_group([0, 1, 2, 3])")
    generation = four.generation
    four.kill(3)
    four.wait_healthy(after=generation)
    code = """
try:
    dist.all_reduce(torch.ones(1), group=own)
except RuntimeError as error:
    caught = type(error).__name__
    own = dist.new_group([0, 1, 2, 3])
t = torch.ones(1)
dist.all_reduce(t, group=own)
caught, int(t)
"""
    assert four.run(code).values == dict.fromkeys(RANKS, ("GroupGone", 4))


def test_a_late_sender(four):
    """The default group has torch's timeout in a receive, too, not that of its forming."""
    code = f"""
import time
got = torch.zeros(3)
if rank == 0:
    time.sleep({LATE_S})
    dist.send(torch.ones(3), 1)
elif rank == 1:
    dist.recv(got, 0)
got.sum().item()
"""
    assert four.run(code, once=True).values[1] == 3


def test_mesh(four, lose, heal):
    """A mesh made by the user has groups of its own, which are cut too, and says that it is of an
    earlier generation."""
    four.run(MESH)
    loss = lose(
        four,
        3,
        collective="if rank == 1: dist.all_reduce(torch.ones(1), group=mesh.get_group('rows'))",
        waiting=[1],
    )
    assert loss.cell_ended_s <= 2 * CELL_ENDS_S  # three groups are cut
    assert any(n.startswith("rank 1 was released from all_reduce") for n in loss.error.notes)
    heal(four, loss)
    check_gone(four, "mesh.get_group('rows')", RANKS, "init_device_mesh")
    check_gone(four, "mesh['columns'].get_group()", RANKS, "init_device_mesh")
    check_gone(
        four, "fc.all_reduce(torch.ones(1), 'sum', (mesh, 0)).wait()", RANKS, "init_device_mesh"
    )
    four.run(MESH)
    code = """
t = torch.tensor([rank + 1.0])
dist.all_reduce(t, group=mesh.get_group("rows"))
u = fc.all_reduce(torch.tensor([rank + 1.0]), "sum", (mesh, 1)).wait()
float(t), float(u)
"""
    assert four.run(code).values == {0: (4, 3), 1: (6, 3), 2: (4, 7), 3: (6, 7)}


def test_every_kind_of_collective_is_freed(four, lose, heal):
    """Ranks that wait in a send, a gather or a barrier with objects are freed as those in an
    all-reduce (T19)."""
    collective = """
if rank == 0: dist.recv(torch.ones(1), 2)
if rank == 1: dist.all_gather_object([None] * 4, rank)
if rank == 3: dist.barrier()
"""
    loss = lose(four, 2, collective=collective)
    assert loss.cell_ended_s <= CELL_ENDS_S
    assert len(loss.error.notes) == 3
    heal(four, loss)
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


def test_asynchronous_work_is_freed(four, lose, heal):
    """`async_op=True` and a later `wait()` are freed too."""
    collective = "work = dist.all_reduce(torch.ones(1), async_op=True)\nprint(1)\nwork.wait()"
    loss = lose(four, 0, collective=collective, is_settled=lambda s: "runs" in s.activity)
    assert loss.cell_ended_s <= CELL_ENDS_S
    heal(four, loss)
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


def test_error_caught_by_the_user(four, lose, heal):
    """A cell that swallows the error of a broken group and goes on in Python is not harmed; the
    next one works."""
    collective = """
try:
    dist.all_reduce(torch.ones(1))
except Exception as error:
    seen = type(error).__name__
went_on = rank
"""
    loss = lose(four, 1, collective=collective)
    assert loss.cell_ended_s <= CELL_ENDS_S + 1
    heal(four, loss)
    assert four.pull("went_on", ranks=[0, 2, 3]) == {0: 0, 2: 2, 3: 3}
    assert four.run(SUM).values == dict.fromkeys(RANKS, 10)


DDP = """
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
with torch.random.fork_rng():
    torch.manual_seed(rank)  # DDP makes them equal
    parts = [torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)]
    if "{kind}" == "norm":  # its buffers differ from rank to rank
        parts.insert(1, torch.nn.BatchNorm1d(8))
    model = DistributedDataParallel(torch.nn.Sequential(*parts))
if "{kind}" == "hook":
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
num_steps_done = 0
def train(num_steps):
    global num_steps_done
    for step in range(num_steps_done, num_steps_done + num_steps):
        data = torch.randn(16, 4, generator=torch.Generator().manual_seed(step * 10 + rank))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        num_steps_done += 1
def parameters():
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
"""


def check_equal_parameters(engines):
    """Every rank has the same parameters; returns them."""
    values = engines.run("parameters()").values
    assert [r for r, v in values.items() if v != values[0]] == [], "ranks that differ from rank 0"
    return values[0]


@pytest.fixture
def ddp(four, request):
    """A DDP model on the shared engines, of the kind that is asked for, trained a little."""
    four.run(DDP.format(kind=request.param))
    four.run("train(3)")
    yield request.param
    four.run("del model, optimizer, train, parameters")


@pytest.mark.parametrize("ddp", ["plain", "hook", "norm"], indirect=True)
@pytest.mark.parametrize("victim", [0, 2])
def test_ddp_trains_on(four, heal, lose, ddp, victim):
    """ray PR#59989, PR#60820: a DDP model made before a loss, that of rank 0 too, trains on after
    it, on every rank, with equal parameters, and with its hook."""
    before = check_equal_parameters(four)
    loss = lose(four, victim, collective="train(1)")
    heal(four, loss)
    check_equal_parameters(four)
    missing = four.status()[victim].not_restored
    assert [name for name in missing if "model" in name or "train" in name] == []
    four.run("train(3)", timeout=20)
    assert check_equal_parameters(four) != before
    assert four.run("len(model._comm_hooks)").values == dict.fromkeys(RANKS, int(ddp == "hook"))


@pytest.mark.parametrize("ddp", ["plain", "norm"], indirect=True)
@pytest.mark.usefixtures("ddp")
def test_ddp_in_a_smaller_and_a_larger_world(four):
    """pytorch#91943, kubeflow/trainer#1509: a DDP model goes on from where it stood, with three
    ranks and with four again, which share the data anew."""
    num_steps = 3
    for size in (3, 4):
        before = check_equal_parameters(four)
        four.scale(size)
        assert four.world_size == size
        assert check_equal_parameters(four) == before
        assert four.run("num_steps_done").values == dict.fromkeys(range(size), num_steps)
        shares = four.run("list(torch.utils.data.DistributedSampler(range(12), shuffle=False))")
        assert sorted(i for share in shares.values.values() for i in share) == list(range(12))
        four.run("train(2)", timeout=20)
        assert check_equal_parameters(four) != before
        num_steps += 2


def test_ddp_on_a_group_of_the_users_own(four):
    """A DDP model on a user's own group cannot come back by itself: it says so, and how to wrap it
    anew."""
    four.run("""
own = dist.new_group([0, 1, 2, 3])
mine = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=own)
""")
    generation = four.generation
    four.kill(1)
    four.wait_healthy(after=generation)
    check_gone(four, "mine(torch.ones(1, 2))", RANKS, "DistributedDataParallel")
    four.run("del mine, own", once=True)


OPEN_SOCKETS = """
import threading, time, zmq
context, pairs, clients, problems = zmq.Context(), [], [], []
server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
is_open = True
def open_sockets():
    while is_open and len(pairs) < 150:
        left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        right.connect(f"tcp://127.0.0.1:{left.bind_to_random_port('tcp://127.0.0.1')}")
        left.rcvtimeo = right.rcvtimeo = 2000
        pairs.append((left, right))
        if len(pairs) % 5 == 0:
            address = ("127.0.0.1", server.port)
            clients.append(dist.TCPStore(*address, None, False, wait_for_workers=False))
        time.sleep(0.01)
thread = threading.Thread(target=open_sockets, daemon=True)
thread.start()
"""
CHECK_SOCKETS = """
is_open = False
thread.join()
for number, (left, right) in enumerate(pairs):
    try:
        left.send(b"there"); right.send(b"back")
        assert (right.recv(), left.recv()) == (b"there", b"back")
    except Exception as error:
        problems.append(f"pair {number}: {error!r}")
for number, client in enumerate(clients):
    try:
        client.set(f"k{number}", str(number))
        assert client.get(f"k{number}") == str(number).encode()
    except Exception as error:
        problems.append(f"client {number}: {error!r}")
len(pairs), len(clients), problems
"""


def test_other_sockets_stay_untouched(cluster, lose, heal):
    """ZMQ and store sockets that an engine opens while groups form and break all still work
    afterwards."""
    engines = cluster(3)
    engines.run(OPEN_SOCKETS, once=True)
    for _ in range(5):
        loss = lose(engines, 2)
        heal(engines, loss)
    for size in (2, 3):
        engines.scale(size)
    values = engines.run(CHECK_SOCKETS, ranks=[0, 1], once=True).values
    for num_pairs, num_clients, problems in values.values():
        assert (num_pairs >= 100, num_clients >= 20) == (True, True), (num_pairs, num_clients)
        assert problems == []


CHILDREN = """
import os, subprocess, time
if rank == 1:
    os.system("sleep 30 &")
if rank == 2:
    subprocess.Popen(["sleep", "30"], close_fds=False)
if rank == 3 and os.fork() == 0:
    time.sleep(30)
    os._exit(0)
"""


def test_rank_with_a_living_child(cluster, lose, heal):
    """A killed rank's child that lives on hides its death from nobody, and does not outlive the
    cluster."""
    engines = cluster(4)
    engines.run(CHILDREN, once=True)
    own = {s.pid for s in engines.status()}
    children = [p for p in psutil.process_iter() if _session_of(p.pid) in own and p.pid not in own]
    assert len(children) >= 3
    for victim in (1, 2, 3):
        loss = lose(engines, victim)
        assert loss.cell_ended_s <= CELL_ENDS_S
        heal(engines, loss)
    assert engines.run(SUM).values == dict.fromkeys(RANKS, 10)
    path = engines._rundir.path
    engines.shutdown()
    assert path not in processes_by_rundir()
    _, alive = psutil.wait_procs(children, timeout=2)
    assert not alive


def _session_of(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
