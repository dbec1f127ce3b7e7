"""The protocol: every message survives the road, nothing else is taken, memberships are checked."""

from __future__ import annotations

import builtins
from typing import Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.protocol import calls, forks, values, wire
from nbdist.protocol import events as ev
from nbdist.protocol import orders as od
from nbdist.protocol.topology import EMPTY, Member, Membership
from nbdist.protocol.wire import VERSION, WireError, decode, encode

PAIR = Membership(
    generation=3,
    members=tuple(Member(slot=s, engine_id=s, pid=100 + s, host="here") for s in (0, 2)),
)


def sample(kind):
    """A value of a type, as full as can be: no field is left to its default."""
    if isinstance(kind, str):
        kind = eval(kind, {**vars(builtins), **vars(ev), **vars(od), **vars(forks)})
    kind = getattr(kind, "__supertype__", kind)
    simple: dict[Any, Any] = {
        int: 7,
        str: "x = 1\n",
        float: 0.5,
        bool: True,
        bytes: b"\x00\xff",
        Membership: PAIR,
    }
    if kind in simple:
        return simple[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{f.name: sample(f.type) for f in msgspec.structs.fields(kind)})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return tuple(sample(one) for one in arguments if one is not ...)
    if origin is dict:
        return {sample(arguments[0]): sample(arguments[1])}
    first = arguments[0]  # a union or a literal
    return first if isinstance(first, str) else sample(first)


def family(union):
    """The classes of a union."""
    return [pytest.param(kind, id=kind.__name__) for kind in get_args(union)]


def assert_survives(message, union):
    assert decode(encode(message), union) == message
    assert decode(memoryview(encode(message)), union) == message


@pytest.mark.parametrize("kind", family(ev.AgentEvent))
def test_what_agents_say_survives_the_road(kind):
    """Every event of an agent comes out as it went in, of its own class."""
    assert_survives(sample(kind), ev.AgentEvent)


@pytest.mark.parametrize("kind", family(od.AgentOrder))
def test_what_agents_are_told_survives_the_road(kind):
    """Every order to an agent comes out as it went in."""
    assert_survives(sample(kind), od.AgentOrder)


@pytest.mark.parametrize("kind", family(od.KernelOrder))
def test_what_kernels_ask_survives_the_road(kind):
    """Every order of a kernel comes out of its envelope as it went in."""
    assert_survives(od.Request(number=3, order=sample(kind)), od.Request)


@pytest.mark.parametrize("kind", family(od.Notice))
def test_what_kernels_are_told_survives_the_road(kind):
    """Every notice and answer comes out as it went in."""
    assert_survives(sample(kind), od.Notice)


@pytest.mark.parametrize("kind", family(od.WorldView | od.CellAdmitted | od.Done | od.Refused))
def test_every_answer_survives_the_road(kind):
    """Each body comes out of its envelope as it went in."""
    assert_survives(od.Answer(number=3, body=sample(kind)), od.Notice)


@pytest.mark.parametrize("kind", family(forks.Fork | forks.FromZygote))
def test_what_supervisor_and_zygote_say_survives_the_road(kind):
    """One message, packed in a frame and split again, is the same."""
    message = sample(kind)
    buffer = bytearray(forks.pack(message))
    (frame,) = forks.split(buffer)
    assert decode(frame, forks.Fork | forks.FromZygote) == message
    assert not buffer


@pytest.mark.parametrize("kind", [ev.Event, od.Order, forks.Message])
def test_the_tag_on_the_wire_is_the_class_name(kind):
    """Names are what the protocol is made of: each class has its own."""
    classes = kind.__subclasses__()
    assert len(classes) > 3
    for cls in classes:
        assert msgspec.msgpack.decode(encode(sample(cls))[1:])["type"] == cls.__name__
        assert cls.__struct_config__.frozen


def test_another_version_is_refused():
    """The version stands first, and both are named."""
    data = encode(od.Ping())
    assert data[0] == VERSION
    with pytest.raises(WireError, match=f"version {VERSION + 1}, expected {VERSION}"):
        decode(bytes([VERSION + 1]) + data[1:], od.Ping)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes([VERSION]),
        bytes([VERSION]) + b"\xc1",
        encode(od.Ping())[:-1],
        encode(od.Ping()) + b"\x00",
        encode(od.Done(text="x")),
        bytes([VERSION]) + msgspec.msgpack.encode({"type": "Ghost"}),
        bytes([VERSION]) + msgspec.msgpack.encode([1, 2]),
        bytes([VERSION]) + msgspec.msgpack.encode({"type": "Scale", "size": "four"}),
        bytes([VERSION]) + msgspec.msgpack.encode({"type": "Scale"}),
    ],
)
def test_what_does_not_fit_the_protocol_is_refused(data):
    """Nothing, too little, too much, an unknown or unexpected class, a wrong or missing field."""
    with pytest.raises(WireError):
        decode(data, od.Ping | od.Scale)


@given(st.binary(max_size=60), st.sampled_from([b"", bytes([VERSION]), encode(od.Ping())]))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_whatever_comes_is_a_message_or_a_wire_error(tail, head):
    """No bytes at all raise anything else: a stranger cannot end the supervisor's thread."""
    for kinds in (od.Request, ev.AgentEvent, od.AgentOrder, od.Notice):
        try:
            decode(head + tail, kinds)
        except WireError:
            continue


def test_a_membership_that_is_none_is_refused_on_the_road_too():
    """Its check runs when it is decoded."""
    members = [{"slot": s, "engine_id": 1, "pid": 1, "host": ""} for s in (2, 0)]
    body = {"type": "CellAdmitted", "membership": {"generation": 1, "members": members}}
    data = bytes([VERSION]) + msgspec.msgpack.encode({**body, "ranks": [0]})
    with pytest.raises(WireError, match="slot order"):
        decode(data, od.CellAdmitted)


# ---- frames


@given(st.lists(st.binary(max_size=9), max_size=5), st.lists(st.integers(1, 20), max_size=9))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_frames_of_any_length_are_split_however_they_arrive(bodies, cuts):
    """Empty ones too, cut anywhere: what was packed comes out, in order, and nothing else."""
    stream = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    buffer, frames = bytearray(), []
    for cut in [*cuts, len(stream)]:
        buffer += stream[:cut]
        stream = stream[cut:]
        frames += forks.split(buffer)
    assert frames == bodies
    assert not buffer


def test_frames_are_split_however_they_arrive():
    """Byte by byte or many at once: whole frames come out, the rest stays."""
    messages = [forks.Forked(slot=s, pid=100 + s) for s in range(3)]
    stream = b"".join(map(forks.pack, messages))
    buffer, frames = bytearray(), []
    for byte in stream:
        buffer.append(byte)
        frames += forks.split(buffer)
    assert [decode(f, forks.FromZygote) for f in frames] == messages
    buffer = bytearray(stream + stream[:5])
    assert len(forks.split(buffer)) == 3
    assert bytes(buffer) == stream[:5]


# ---- memberships


def test_ranks_are_places_in_slot_order():
    """Slots 0 and 2 are ranks 0 and 1; an absent slot has no rank."""
    assert (PAIR.world_size, PAIR.slots) == (2, (0, 2))
    assert [PAIR.rank_of(s) for s in (0, 2)] == [0, 1]
    assert 2 in PAIR
    assert 1 not in PAIR
    with pytest.raises(KeyError):
        PAIR.rank_of(1)


@pytest.mark.parametrize("slots", [(2, 0), (0, 0)])
def test_members_stand_in_slot_order_each_slot_once(slots):
    """Anything else is no membership, and the slots are named."""
    members = tuple(Member(slot=s, engine_id=1, pid=1, host="") for s in slots)
    with pytest.raises(ValueError, match=str(list(slots)).replace("[", r"\[")):
        Membership(generation=1, members=members)


def test_before_the_first_group_there_is_an_empty_membership():
    """Generation 0 stands for none."""
    assert (EMPTY.generation, EMPTY.world_size, EMPTY.slots) == (0, 0, ())


# ---- values and calls


def test_values_come_back():
    """Plain values, and functions and classes made in a notebook, which no module holds."""
    factor = 3
    assert values.unpack(values.pack({"a": [1, 2.5, None]})) == {"a": [1, 2.5, None]}
    assert values.unpack(values.pack(lambda x: factor * x))(2) == 6


def test_what_cannot_be_packed_says_so_at_once():
    """The error is the pickler's own, where the value is."""
    with pytest.raises(TypeError, match="generator"):
        values.pack(i for i in range(3))


@pytest.mark.parametrize("name", ["push", "pull"])
def test_calls_are_expressions_that_name_an_engine_function(name):
    """ipyparallel evaluates them there; the kernel loads nothing for it."""
    text = getattr(calls, name.upper())
    compile(text, "call", "eval")
    assert text == f"__import__('nbdist.engine.entry', fromlist=['{name}']).{name}"


def test_a_wire_error_is_a_value_error():
    """Whoever knows nothing of the wire can still catch it."""
    assert issubclass(wire.WireError, ValueError)
