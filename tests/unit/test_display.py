"""What a cell shows: headings, folding, live updates, tables."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbdist.frontend.display import (
    CellDisplay,
    LiveText,
    is_live,
    render,
    show_seats,
    show_status,
    show_table,
    show_warnings,
)
from nbdist.protocol.events import Incident
from nbdist.session.outputs import Progress, RankOutput


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """An IPython shell without a front end, taken down afterwards."""
    config = Config({"HistoryManager": {"enabled": False}})
    folder = str(tmp_path_factory.mktemp("ipython"))
    shell = InteractiveShell.instance(config=config, ipython_dir=folder)
    yield shell
    shell.restore_sys_module_state()
    InteractiveShell.clear_instance()


@pytest.fixture
def published(shell, monkeypatch):
    """Everything that is displayed, in order: data, metadata, and whether it is an update."""
    publisher = CapturingDisplayPublisher()
    monkeypatch.setattr(shell, "display_pub", publisher)
    return publisher.outputs


def progress(done=True, **ranks):
    """A cell: `r0="text"`, or a RankOutput."""
    outputs = {}
    for name, given in ranks.items():
        outputs[int(name[1:])] = given if isinstance(given, RankOutput) else put_out(("out", given))
    return Progress(cell="c1", ranks=outputs, done=done, generation=1, seconds=0.5)


def put_out(*items, state="ok"):
    """A rank's output: ("out" or "err", text) or a MIME bundle each."""
    output = RankOutput(state=state)
    for item in items:
        if isinstance(item, dict):
            output.add_rich(item, {})
        else:
            output.add_text({"out": "stdout", "err": "stderr"}[item[0]], item[1])
    return output


def texts(published):
    """The plain text of each display."""
    return [one["data"]["text/plain"] for one in published]


def test_equal_ranks_share_a_heading_and_others_have_their_own():
    """Output is in rank order, and each text is shown once."""
    shown = render(progress(r3="a\n", r0="a\n", r1="a\n", r2="b\n"))
    assert shown == "[ranks 0-1,3]\na\n[rank 2]\nb"


def test_notes_are_the_last_lines():
    """Where a cell has them, also without any output."""
    shown = replace(progress(r0="x\n"), notes=("ran between steps 41 and 42",))
    assert render(shown) == "[rank 0]\nx\n[ran between steps 41 and 42]"
    assert render(replace(progress(r0=""), notes=("a", "b"))) == "[a]\n[b]"


def test_a_rank_that_was_lost_is_marked():
    """What it had put out is kept."""
    assert render(progress(r0=put_out(("out", "x\n"), state="lost"))) == "[rank 0, lost]\nx"


def test_a_line_is_updated_in_place_or_shown_once(published):
    """Headless it is shown when it is done; equal text is not shown again."""
    for headless, expected in ((True, ["b"]), (False, ["a", "b"])):
        published.clear()
        line = LiveText(headless)
        for text, done in (("a", False), ("a", False), ("b", True)):
            line.show(text, done=done)
        assert texts(published) == expected


def test_a_single_rank_is_named_too():
    """A heading stands even over the output of one rank."""
    assert render(progress(r2="x\n")) == "[rank 2]\nx"


@pytest.mark.parametrize("line", ["loss 0.3 cell_id", "  [rank 1]  ", "\tä  \x1b[31mred", "<b>&"])
def test_a_printed_line_is_one_unaltered_line(line):
    """Nothing is stripped, filtered or escaped."""
    assert render(progress(r0=f"first\n{line}\n\n")).split("\n") == ["[rank 0]", "first", line, ""]


def test_stderr_has_a_heading_of_its_own():
    """The streams are folded apart, each in rank order."""
    cell = progress(
        r0=put_out(("out", "hi\n"), ("err", "w0\n"), ("out", "there\n")),
        r1=put_out(("out", "hi\nthere\n"), ("err", "w1")),
    )
    assert render(cell) == "[ranks 0-1]\nhi\nthere\n[rank 0 stderr]\nw0\n[rank 1 stderr]\nw1"


@pytest.mark.parametrize(
    ("state", "heading"),
    [
        ("ok", "[rank 0]"),
        ("running", "[rank 0, running]"),
        ("error", "[rank 0, failed]"),
        ("died", "[rank 0, died]"),
        ("released", "[rank 0, released]"),
    ],
)
def test_a_heading_tells_how_its_ranks_stand(state, heading):
    """Every state but success is marked."""
    assert render(progress(r0=put_out(("out", "x"), state=state))) == f"{heading}\nx"


def test_equal_text_in_different_states_is_not_folded():
    """A rank that failed is told from those that did not."""
    cell = progress(r0="x", r1=put_out(("out", "x"), state="error"), r2="x")
    assert render(cell) == "[ranks 0,2]\nx\n[rank 1, failed]\nx"


def test_a_rank_without_output_has_no_heading():
    """Silence takes no room."""
    assert render(progress(r0="", r1="x\n", r2=RankOutput())) == "[rank 1]\nx"


@pytest.mark.parametrize(
    ("printed", "lines"),
    [
        ("\r 0%\r 50%\r100%\nend\n", ["100%", "end"]),
        ("windows\r\nlines\r\n", ["windows", "lines"]),
        ("half\r", ["half"]),
        ("long state\rnew\n", ["new"]),
        ("kept\n\r  5%\r      \rnext\n", ["kept", "next"]),
        ("kept\n\r  5%\r      \r", ["kept"]),
    ],
)
def test_a_line_that_is_written_over_shows_its_last_state(printed, lines):
    """Progress bars are readable, and gone where they wiped themselves out."""
    assert render(progress(r0=printed)).split("\n") == ["[rank 0]", *lines]


def test_a_bar_that_is_gone_leaves_no_heading():
    """What shows nothing on a terminal shows nothing here."""
    assert render(progress(r0="\r 5%\r   \r")) == ""


@pytest.mark.parametrize(("num_lines", "num_shown"), [(200, 200), (201, 201), (1000, 201)])
def test_a_long_output_keeps_its_ends(num_lines, num_shown):
    """Above 200 lines a note stands for the middle; it counts what it replaces."""
    lines = render(progress(r0="".join(f"{n}\n" for n in range(num_lines)))).split("\n")[1:]
    assert len(lines) == num_shown
    assert (lines[0], lines[-1]) == ("0", str(num_lines - 1))
    notes = [line for line in lines if "left out" in line]
    expected = f"[{num_lines - 200} lines left out here; the log of the rank's slot has them all]"
    assert notes == ([expected] if num_lines > 200 else [])


def test_results_and_plain_displays_are_lines_of_the_text():
    """A value of text alone stands on its own line, between what was printed around it."""
    cell = progress(r0=put_out(("out", "no newline"), {"text/plain": "42"}, ("out", "after\n")))
    assert render(cell) == "[rank 0]\nno newline\n42\nafter"


def test_a_widget_of_an_engine_is_shown_as_text():
    """Its model lives on the engine: the page could not draw it."""
    bundle = {"text/plain": "IntSlider()", "application/vnd.jupyter.widget-view+json": {}}
    assert render(progress(r0=put_out(bundle))) == "[rank 0]\nIntSlider()"


def test_headless_shows_once_at_the_end(published):
    """No display before the cell is done, one then, and no update."""
    shown = CellDisplay(headless=True)
    shown.update(progress(done=False, r0="a\n"))
    assert published == []
    shown.update(progress(r0="a\nb\n"))
    assert texts(published) == ["[rank 0]\na\nb"]
    assert not published[0]["update"]
    assert "display_id" not in (published[0]["transient"] or {})


def test_live_ends_in_the_text_that_headless_shows(published):
    """One display, updated in place, up to the identical text."""
    shown = CellDisplay(headless=False, clock=lambda: 0.0)
    running = put_out(("out", "a\n"), state="running")
    last = progress(r0="a\n", r1=put_out(("err", "b"), state="error"))
    for step in (progress(done=False, r0=RankOutput()), progress(done=False, r0=running), last):
        shown.update(step)
    assert texts(published) == ["[rank 0, running]\na", render(last)]
    assert [one["update"] for one in published] == [False, True]
    assert len({one["transient"]["display_id"] for one in published}) == 1


def test_live_publishes_nothing_where_nothing_changed(published):
    """An equal text is not sent again, not even at the end."""
    shown = CellDisplay(headless=False, clock=lambda: 0.0)
    for done in (False, False, True):
        shown.update(progress(done=done, r0="a\n"))
    assert len(published) == 1


def test_live_rests_after_a_slow_redraw(published):
    """A redraw that took a second is followed by ten without one; the last is always made."""
    times = iter([0.0, 0.0, 1.0, 10.9, 11.1, 11.1, 11.1])
    shown = CellDisplay(headless=False, clock=lambda: next(times))
    shown.update(progress(done=False, r0="a\n"))
    shown.update(progress(done=False, r0="a\nb\n"))
    assert len(published) == 1
    shown.update(progress(done=False, r0="a\nb\nc\n"))
    shown.update(progress(r0="a\nb\nc\nd\n"))
    assert texts(published)[1:] == ["[rank 0]\na\nb\nc", "[rank 0]\na\nb\nc\nd"]


@pytest.mark.parametrize("headless", [True, False])
def test_a_silent_cell_shows_nothing(published, headless):
    """No output, no display."""
    shown = CellDisplay(headless=headless)
    shown.update(progress(done=False, r0=RankOutput()))
    shown.update(progress(r0="", r1=""))
    assert published == []


@pytest.mark.parametrize("headless", [True, False])
def test_pictures_follow_the_text_in_order_under_their_rank(published, headless):
    """Each is an output of its own with its bundle; equal ones are shown once."""
    one = {"text/plain": "<Figure at 0x1>", "image/png": "AAA"}
    other = {"text/plain": "<Figure at 0x2>", "image/png": "AAA"}
    table = {"text/plain": "t", "text/html": "<table>"}
    shown = CellDisplay(headless=headless)
    cell = progress(
        r0=put_out(one, ("out", "a\n")), r1=put_out(other, ("out", "a\n")), r2=put_out(table, one)
    )
    shown.update(cell)
    assert [one["data"] for one in published] == [
        {"text/plain": "[ranks 0-1]\na"},
        {"text/plain": "[ranks 0-1]"},
        one,
        {"text/plain": "[rank 2]"},
        table,
        one,
    ]


def test_a_pictures_metadata_is_passed_on(published):
    """Sizes that the engine sent reach the page."""
    output = RankOutput(state="ok")
    output.add_rich({"image/png": "AAA"}, {"image/png": {"width": 5}})
    CellDisplay(headless=True).update(progress(r0=output))
    assert published[-1]["metadata"] == {"image/png": {"width": 5}}


@pytest.mark.parametrize(
    ("shell", "live"),
    [
        (None, False),
        (SimpleNamespace(), False),
        (SimpleNamespace(kernel=None), False),
        (SimpleNamespace(kernel=SimpleNamespace(get_parent=lambda: None)), False),
        (SimpleNamespace(kernel=SimpleNamespace(get_parent=dict)), False),
        (SimpleNamespace(kernel=SimpleNamespace(get_parent=lambda: {"content": {}})), False),
        *(
            (
                SimpleNamespace(
                    kernel=SimpleNamespace(
                        get_parent=lambda a=answer: {"content": {"allow_stdin": a}}
                    )
                ),
                answer,
            )
            for answer in (True, False)
        ),
    ],
)
def test_live_means_that_the_front_end_can_be_asked(shell, live):
    """Only a kernel whose execute request allows stdin updates its displays."""
    assert is_live(shell) is live


def seat(rank, slot, **changed):
    """One rank's status."""
    values = {
        "state": "member", "generation": 2, "device": "cpu", "pid": 100 + slot, "host": "here",
        "memory_bytes": 3 << 20, "step": None, "samples_per_second": None, "activity": "idle",
        "slow_factor": 1.0,
        "not_restored": {},
    }  # fmt: skip
    return SimpleNamespace(rank=rank, slot=slot, **{**values, **changed})


def test_tables_are_aligned(capsys):
    """Columns begin below one another; what is absent is a dash; no line ends in blanks."""
    show_table(["rank", "x"], [[0, "long one"], [None, "b"]])
    assert capsys.readouterr().out == "rank  x\n0     long one\n–     b\n"


def test_seats_show_host_and_pid_on_demand(capsys):
    """The short table holds nothing that differs from one start to the next."""
    show_seats([seat(0, 0), seat(1, 2)], is_verbose=False)
    assert capsys.readouterr().out == "rank  slot  device\n0     0     cpu\n1     2     cpu\n"
    show_seats([seat(1, 2)], is_verbose=True)
    assert capsys.readouterr().out.splitlines()[1].split() == ["1", "2", "cpu", "here", "102"]


def test_status_lists_ranks_losses_and_incidents(capsys):
    """The table comes first, then what is missing on whom, then the incidents in one line."""
    seats = [
        seat(0, 0, step=7, samples_per_second=12.34),
        seat(1, 1, not_restored={"opt": "cannot be copied"}),
        seat(None, 2, state="empty", not_restored={"m": "no survivor"}),
    ]
    lost = Incident(
        kind="lost", slots=(2,), ranks=(2,), cause="SIGKILL", generation_before=2,
        generation_after=3,
    )  # fmt: skip
    joined = Incident(kind="joined", slots=(1, 2), ranks=(1, 2), cause="", generation_before=3)
    show_status(seats, [lost])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["rank", "slot", "state", "generation"]
    assert lines[1].split() == ["0", "0", "member", "2", "cpu", "3", "MiB", "7", "12.3", "idle"]
    assert lines[3].split()[:3] == ["–", "2", "empty"]
    assert lines[4:] == [
        "Not restored on rank 1: opt (cannot be copied)",
        "Not restored on slot 2: m (no survivor)",
        "Incidents: 1 lost; last: slot 2 lost (SIGKILL), generation 2 -> 3",
    ]
    show_status(seats, [lost, lost, joined])
    assert capsys.readouterr().out.splitlines()[-1] == (
        "Incidents: 2 lost, 1 joined; last: slots 1-2 joined, generation 3 -> no new one yet"
    )


def test_warnings_are_said(capsys):
    """Each is one line that calls itself a warning."""
    show_warnings(["fork is not possible", "b"])
    assert capsys.readouterr().out == "Warning: fork is not possible\nWarning: b\n"
