"""The main job on real engines."""

from __future__ import annotations

from nbdist.cli import main
from nbdist.supervisor.replay import read


def test_the_main_job_loses_nothing(tmp_path, capsys):
    """A rank killed, another stopped: all checks hold, and report and record are there."""
    report = tmp_path / "report.html"
    code = main(["demo", "-n", "2", "--steps", "24", "--report", str(report)])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "after 8 steps" in out
    assert "FAILED" not in out
    assert read(report.with_suffix(".jsonl")).story().rows["step"].tolist() == list(range(24))
    assert "replicas are equal bit for bit" in report.read_text(encoding="utf-8")
