"""A group that a member does not come to."""

import subprocess
import sys

ALONE = """
import time
import torch.distributed as dist
from nbdist.engine.group import FORM_TIMEOUT, Groups
from nbdist.protocol.orders import FormGroup
from nbdist.protocol.topology import Member, Membership

store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
groups = Groups()
groups.install()

def form(generation, size, rank):
    members = tuple(Member(slot=s, engine_id=s, pid=s + 1, host="here") for s in range(size))
    group = Membership(generation=generation, members=members)
    order = FormGroup(membership=group, run=None, store_host="127.0.0.1", store_port=store.port)
    groups.form(order, rank, "gloo")

for generation, rank in ((1, 0), (2, 2)):
    begun = time.monotonic()
    try:
        form(generation, 3, rank)
    except RuntimeError:
        assert time.monotonic() - begun < 2 * FORM_TIMEOUT.total_seconds()
    else:
        raise AssertionError("it was formed")
    groups.destroy()
form(3, 1, 0)
assert dist.get_world_size() == 1
groups.destroy()
"""


def test_a_member_does_not_come():
    """Who waits for it is freed in time, though the group has torch's own timeout, and forms the
    next one."""
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=60)
