"""Rank selections: what is read, what is refused, and with which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.errors import TargetError
from nbdist.frontend.targets import format_ranks, name_ranks, parse_targets

WORLDS = st.integers(1, 40)
BOUNDS = st.none() | st.integers(-50, 50)
STEPS = st.none() | st.integers(-9, 9).filter(bool)


@st.composite
def worlds_and_ranks(draw):
    """A world's size and some of its ranks, at least one."""
    world_size = draw(WORLDS)
    return world_size, draw(st.sets(st.integers(0, world_size - 1), min_size=1))


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", (0,)),
        ("3,1,1", (1, 3)),
        (" 0 , 2 - 3 ", (0, 2, 3)),
        ("1-1", (1,)),
        ("1:3", (1, 2)),
        (":", (0, 1, 2, 3, 4, 5)),
        ("::2", (0, 2, 4)),
        ("-2:", (4, 5)),
        ("::-1", (0, 1, 2, 3, 4, 5)),
        ("4:99", (4, 5)),
        ("all", (0, 1, 2, 3, 4, 5)),
        ("!2", (0, 1, 3, 4, 5)),
        ("! 0, 2-3", (1, 4, 5)),
        ("!0,!1", (2, 3, 4, 5)),
        ("0-3,!1,2", (0, 3)),
        ("0,4:,2-3", (0, 2, 3, 4, 5)),
    ],
)
def test_every_spelling_selects_its_ranks(text, ranks):
    """Ranks come sorted, each once, in a world of six."""
    assert parse_targets(text, 6) == ranks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot read ''"),
        ("0,,2", "cannot read '' in the ranks '0,,2'"),
        ("0,", "take the comma or ! away"),
        ("0,x1,2", "cannot read 'x1' in the ranks '0,x1,2'"),
        ("0 2", "cannot read '0 2'"),
        ("-1", "-1: (the last)"),
        ("3-1", "write 1-3"),
        ("::0", "step of a slice cannot be 0"),
        ("0!2", "cannot read '0!2'"),
        ("!", "cannot read ''"),
        ("1:2:3:4", "cannot read '1:2:3:4'"),
        ("all ranks", "cannot read 'all ranks'"),
        ("²", "cannot read '²'"),
        ("__import__('os')", "cannot read"),
        ("9" * 5000, "cannot read"),
    ],
)
def test_text_that_cannot_be_read_is_named(text, words):
    """The message shows the bad part, or what to write instead."""
    with pytest.raises(TargetError) as caught:
        parse_targets(text, 4)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4", "no rank 4 in this world, which has ranks 0-3"),
        ("0,7", "%dist_scale 8"),
        ("2-5", "no ranks 4-5"),
        ("!9", "no rank 9"),
        ("0-999999999", "no ranks 4-999999999"),
    ],
)
def test_a_rank_that_the_world_lacks_is_named_with_the_world(text, words):
    """The message names the rank, the ranks there are, and how to get more."""
    with pytest.raises(TargetError) as caught:
        parse_targets(text, 4)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["3:1", "!all", "1,!1", "7:"])
def test_a_selection_of_nothing_is_refused(text):
    """A cell for no rank at all is a mistake."""
    with pytest.raises(TargetError, match="selects none of the ranks 0-3"):
        parse_targets(text, 4)


@given(WORLDS, BOUNDS, BOUNDS, STEPS)
def test_slices_mean_what_python_means(world_size, start, stop, step):
    """A slice selects what it selects from a range of the world's size."""
    text = ":".join("" if bound is None else str(bound) for bound in (start, stop, step))
    expected = tuple(sorted(range(world_size)[start:stop:step]))
    if expected:
        assert parse_targets(text, world_size) == expected
    else:
        with pytest.raises(TargetError):
            parse_targets(text, world_size)


@given(worlds_and_ranks())
def test_what_is_written_is_read_again(world_and_ranks):
    """`format_ranks` writes a selection that gives the same ranks."""
    world_size, ranks = world_and_ranks
    assert parse_targets(format_ranks(ranks), world_size) == tuple(sorted(ranks))


@given(worlds_and_ranks())
def test_taking_ranks_away_leaves_the_others(world_and_ranks):
    """`!` before a selection selects exactly its complement."""
    world_size, ranks = world_and_ranks
    others = tuple(rank for rank in range(world_size) if rank not in ranks)
    if others:
        assert parse_targets(f"!{format_ranks(ranks)}", world_size) == others
    else:
        with pytest.raises(TargetError):
            parse_targets(f"!{format_ranks(ranks)}", world_size)


@given(st.text(alphabet="0123456789,-:! al", max_size=12), WORLDS)
def test_any_text_gives_ranks_of_the_world_or_a_target_error(text, world_size):
    """No text raises anything else, or gives a rank that is not there."""
    try:
        ranks = parse_targets(text, world_size)
    except TargetError:
        return
    assert ranks
    assert ranks == tuple(sorted(set(ranks) & set(range(world_size))))


@pytest.mark.parametrize(
    ("ranks", "short", "named"),
    [
        ((), "", "no ranks"),
        ((2,), "2", "rank 2"),
        ((5, 0, 1, 2), "0-2,5", "ranks 0-2,5"),
        ((0, 1), "0-1", "ranks 0-1"),
        ((0, 2, 4), "0,2,4", "ranks 0,2,4"),
    ],
)
def test_ranks_are_written_shortly(ranks, short, named):
    """Neighbours become a range; a single rank is called a rank."""
    assert format_ranks(ranks) == short
    assert name_ranks(ranks) == named
