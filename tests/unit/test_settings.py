"""From what the user gives to the settings of a cluster."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from nbdist.config import ClusterConfig
from nbdist.session import settings as module
from nbdist.session.settings import cluster_config


@pytest.fixture(autouse=True)
def _host(monkeypatch):
    """A host that offers three slots."""
    monkeypatch.setattr(module, "default_num_engines", lambda: 3)


@pytest.fixture
def profile(tmp_path):
    """Writes a profile; its path."""
    path = tmp_path / "profile.toml"

    def write(text):
        path.write_text(text)
        return str(path)

    return write


def test_without_anything_given_the_host_decides():
    """As many engines as it offers, and the defaults."""
    assert cluster_config(None) == ClusterConfig(num_engines=3)


def test_an_argument_that_is_none_was_not_given():
    """Its default holds, or what the profile says."""
    assert cluster_config(None, num_engines=None, policy=None) == ClusterConfig(num_engines=3)


def test_arguments_go_before_the_profile_and_the_profile_before_the_host(profile):
    """Each may say a part."""
    path = profile('[nbdist]\nnum_engines = 2\npolicy = "shrink"\n[other]\nghost = 1\n')
    assert cluster_config(path) == ClusterConfig(num_engines=2, policy="shrink")
    config = cluster_config(path, num_engines=4, policy=None)
    assert config == ClusterConfig(num_engines=4, policy="shrink")


def test_a_profile_for_others_says_nothing(profile):
    """A file without our table is as good as none."""
    assert cluster_config(profile("[other]\nx = 1\n")) == ClusterConfig(num_engines=3)


def test_the_devices_say_how_many_engines(profile):
    """One for each, from arguments and from a profile alike."""
    assert cluster_config(None, devices=[1, 0]).devices == (1, 0)
    assert cluster_config(None, devices=[1, 0]).num_engines == 2
    assert cluster_config(profile("[nbdist]\ndevices = [3]\n")).num_engines == 1


@pytest.mark.parametrize("kind", [list, tuple, range, np.array])
def test_devices_may_come_as_any_sequence(kind):
    """They are numbers of Python's in the end."""
    given = range(2) if kind is range else kind([0, 1])
    assert cluster_config(None, devices=given).devices == (0, 1)


def test_numbers_of_numpy_become_those_of_python():
    """They are written as JSON and read by every process of the cluster."""
    config = cluster_config(
        None, num_engines=np.int64(2), devices=np.arange(2), max_restarts=np.int8(4)
    )
    assert type(config.num_engines) is type(config.max_restarts) is int
    assert {type(device) for device in config.devices} == {int}
    assert ClusterConfig.from_mapping(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"num_engines": True}, "num_engines=True: must be an integer"),
        ({"num_engines": 2.0}, r"num_engines=2\.0: must be an integer"),
        ({"num_engines": "2"}, "num_engines='2': must be an integer"),
        ({"num_engines": 0}, "at least 1"),
        ({"devices": "cuda:0"}, "devices='cuda:0': must be GPU numbers"),
        ({"devices": ["cuda:0"]}, "must be GPU numbers"),
        ({"num_engins": 2}, "unknown setting 'num_engins'"),
    ],
)
def test_what_makes_no_sense_is_refused(given, match):
    """A conversion never makes sense of it by force."""
    with pytest.raises(ValueError, match=match):
        cluster_config(None, **given)


def test_a_slip_of_the_pen_in_a_profile_is_found(profile):
    """The key is named, with the known ones."""
    with pytest.raises(ValueError, match="unknown setting 'polcy'; known: backend, "):
        cluster_config(profile('[nbdist]\npolcy = "shrink"\n'))


@pytest.mark.parametrize("text", ["[nbdist", "x = \n", "nbdist = 3\n"])
def test_a_profile_that_cannot_be_read_is_named(profile, text):
    """The message has its path."""
    with pytest.raises(ValueError, match="profile="):
        cluster_config(profile(text))


def test_a_profile_that_is_not_there_is_named(tmp_path):
    """Likewise."""
    with pytest.raises(ValueError, match=r"profile=.*none\.toml.*cannot be read"):
        cluster_config(str(tmp_path / "none.toml"))


@pytest.mark.parametrize("kind", [str, Path])
def test_the_folder_of_records_is_where_the_notebook_says(kind, monkeypatch, tmp_path):
    """A relative path counts from the kernel's folder; none stays none."""
    monkeypatch.chdir(tmp_path)
    assert cluster_config(None, record=kind("runs")).record == str(tmp_path / "runs")
    assert cluster_config(None).record == ""
    with pytest.raises(ValueError, match="record=5: must be a folder"):
        cluster_config(None, record=5)
