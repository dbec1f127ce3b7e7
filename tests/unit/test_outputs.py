"""What ranks put out, in order."""

from __future__ import annotations

from nbdist.session.outputs import NotSent, RankOutput, Rich, Text


def test_pieces_of_one_stream_are_joined():
    """What is printed in pieces is one text; another stream or a display begins a new one."""
    output = RankOutput()
    output.add_text("stdout", "a")
    output.add_text("stdout", "b\n")
    output.add_text("stderr", "warning\n")
    output.add_rich({"text/plain": "<Figure>"}, {"width": 1})
    output.add_text("stdout", "c")
    output.add_rich({"text/plain": "7"}, {}, is_result=True)
    assert output.items == [
        Text("stdout", "ab\n"),
        Text("stderr", "warning\n"),
        Rich({"text/plain": "<Figure>"}, {"width": 1}),
        Text("stdout", "c"),
        Rich({"text/plain": "7"}, {}, is_result=True),
    ]


def test_the_text_has_displays_and_results_on_lines_of_their_own():
    """Everything that can be read, in order; what has no plain form is left out."""
    output = RankOutput()
    output.add_rich({"text/plain": "first"}, {})
    output.add_text("stdout", "a")
    output.add_rich({"image/png": "…"}, {})
    output.add_rich({"text/plain": "7"}, {}, is_result=True)
    output.add_text("stderr", "b")
    assert output.text == "first\na\n7\nb"


def test_silence_is_no_text():
    """A rank that put out nothing has an empty text and still runs."""
    output = RankOutput()
    assert (output.text, output.state) == ("", "running")


def test_a_display_without_a_plain_form_leaves_no_trace_in_the_text():
    """Pictures alone add no empty lines."""
    output = RankOutput()
    output.add_text("stdout", "a")
    output.add_rich({"image/png": "…"}, {})
    output.add_text("stdout", "b")
    assert output.text == "ab"


def test_a_value_that_stayed_behind_says_why():
    """It is shown with its reason."""
    assert "cannot pickle" in repr(NotSent("cannot pickle 'generator' object"))


def test_a_line_of_ours_begins_where_a_line_begins():
    """What was printed before keeps its own line."""
    output = RankOutput()
    output.add_line("[one]")
    output.add_text("stdout", "half")
    output.add_line("[two]")
    output.add_line("[three]")
    assert output.text == "[one]\nhalf\n[two]\n[three]\n"
