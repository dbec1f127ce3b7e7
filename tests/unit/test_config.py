"""Settings: what is allowed, and what is said of the rest."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, asdict, fields

import pytest

from nbdist.config import ClusterConfig


def test_one_number_is_enough():
    """Everything else has a default that works on any machine."""
    config = ClusterConfig(num_engines=2)
    assert (config.policy, config.backend, config.launcher) == ("refill", "auto", "local")
    assert not config.keep
    assert ClusterConfig(num_engines=2, policy="shrink", devices=(0, 3)).devices == (0, 3)


def test_settings_do_not_change():
    """A cluster's settings are those of its start."""
    with pytest.raises(FrozenInstanceError):
        ClusterConfig(num_engines=2).num_engines = 3


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("num_engines", 0, "at least 1"),
        ("num_engines", -1, "at least 1"),
        ("min_world", 0, "at least 1"),
        ("min_world", 3, "at most num_engines=2"),
        ("num_engines", True, "an integer"),
        ("num_engines", 2.0, "an integer"),
        ("num_engines", "2", "an integer"),
        ("num_engines", None, "an integer"),
        ("min_world", 1.0, "an integer"),
        ("max_restarts", True, "an integer"),
        ("threads_per_engine", 0.5, "an integer"),
        ("max_restarts", 0, "at least 1"),
        ("telemetry_max_mb", 0, "at least 1"),
        ("telemetry_max_mb", 0.5, "an integer"),
        ("record", 5, "a folder"),
        ("threads_per_engine", -1, "0 or more"),
        ("hang_timeout_s", 0.0, "more than 0 seconds"),
        ("start_timeout_s", -1.0, "more than 0 seconds"),
        ("replay_limit_s", 0.0, "more than 0 seconds"),
        ("lease_s", 0.0, "more than 0 seconds"),
        ("lease_s", float("nan"), "more than 0 seconds"),
        ("lease_s", float("inf"), "and finite"),
        ("hang_timeout_s", 1e12, "and finite"),
        ("start_timeout_s", 10**400, "and finite"),
        ("replay_limit_s", "30", "more than 0 seconds"),
        ("hang_timeout_s", None, "more than 0 seconds"),
        ("hang_timeout_s", True, "more than 0 seconds"),
        ("backend", "mpi", "auto, gloo or nccl"),
        ("policy", "hope", "refill or shrink"),
        ("launcher", "kubernetes", "local"),
        ("devices", (0, 0), "each device once"),
        ("devices", (0, 1, 2), "2 of them"),
        ("devices", ("cuda:0", "cuda:1"), "GPU numbers"),
        ("devices", "01", "GPU numbers"),
        ("devices", (0.0, 1.0), "GPU numbers"),
        ("devices", (True, False), "GPU numbers"),
        ("devices", 1, "GPU numbers"),
    ],
)
def test_what_makes_no_sense_is_named_with_what_is_allowed(setting, value, allowed):
    """The message has the setting, its value and the way out."""
    with pytest.raises(ValueError, match=f"^{setting}=") as caught:
        ClusterConfig(**{"num_engines": 2, setting: value})
    assert allowed in str(caught.value)
    shown = {repr(value), repr(list(value))} if isinstance(value, tuple) else {repr(value)}
    assert any(text in str(caught.value) for text in shown)


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        ("policy", "wait", "policy='wait' is not there yet"),
        ("policy", "raise", "policy='raise' is not there yet"),
        ("launcher", "ssh", "only local engines"),
        ("hosts", ("a",), r"hosts=\['a'\]"),
    ],
)
def test_what_comes_later_is_told_apart_from_a_mistake(setting, value, text):
    """A word of the plan is refused as such."""
    with pytest.raises(ValueError, match=text):
        ClusterConfig(**{"num_engines": 2, setting: value})


def test_a_file_gives_the_same_settings_back():
    """Written as JSON and read again: lists are tuples again, and all is equal."""
    config = ClusterConfig(num_engines=2, devices=(1, 0), hang_timeout_s=2.0, keep=True)
    assert ClusterConfig.from_mapping(json.loads(json.dumps(asdict(config)))) == config


def test_an_unknown_setting_is_named_with_the_known_ones():
    """A slip of the pen in a profile is found at once."""
    with pytest.raises(
        ValueError, match="unknown setting 'num_engins'; known: backend, "
    ) as caught:
        ClusterConfig.from_mapping({"num_engins": 2})
    for field in fields(ClusterConfig):
        assert field.name in str(caught.value)
