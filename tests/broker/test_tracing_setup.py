"""Traces are off by default, cost no import then, and say what is missing when they are on."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from typing import Any

import pytest

from tidelog.broker.settings import TracingSettings
from tidelog.broker.telemetry.tracing_setup import open_tracing
from tidelog.config import load
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import ConfigError

ON = TracingSettings(endpoint="http://127.0.0.1:4318")


@pytest.mark.processes
def test_a_broker_without_an_endpoint_imports_no_sdk() -> None:
    assert open_tracing(TracingSettings(), SystemClock(), random.Random(1)) is None
    code = "import sys, tidelog.broker.node; print([each for each in sys.modules if each.startswith('opentelemetry')])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.strip() == "[]"


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without_sdk(name: str, package: str | None = None) -> Any:
        if name.startswith("opentelemetry.sdk"):
            raise ModuleNotFoundError(name)
        return found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_sdk)
    with pytest.raises(ConfigError, match=r"tracing\.endpoint is http://127\.0\.0\.1:4318") as caught:
        open_tracing(ON, SystemClock(), random.Random(1))
    assert "tidelog[tracing]" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tracing.sample_ratio", "1.1"),
        ("tracing.sample_ratio", "-0.1"),
        ("tracing.sample_ratio", "nan"),
        ("tracing.endpoint", "collector:4318"),
        ("tracing.endpoint", "http://user:password@collector:4318"),
        ("tracing.endpoint", "http://collector:4318/?key=secret"),
        ("tracing.service_name", ""),
    ],
)
def test_settings_are_bounded(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load(flags=[(key, value)])
