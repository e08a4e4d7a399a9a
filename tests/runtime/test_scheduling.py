"""A thread's wish for short slices: as the kernel reports it, for this thread alone, with its nice value kept."""

import ctypes
import os
import platform
import struct
import threading

import pytest

from tidelog.runtime import scheduling

_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
_RUNTIME_AT = 24


def _kernel() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)


def _attributes() -> tuple[int, int]:
    """Nice value and slice, in ns, of the calling thread."""
    buffer = ctypes.create_string_buffer(56)
    assert ctypes.CDLL(None).syscall(_SCHED_GETATTR[platform.machine()], 0, buffer, 56, 0) == 0
    (nice,) = struct.unpack_from("=i", buffer.raw, 16)
    (runtime,) = struct.unpack_from("=Q", buffer.raw, _RUNTIME_AT)
    return nice, runtime


@pytest.mark.skipif(
    platform.machine() not in _SCHED_GETATTR or platform.system() != "Linux" or _kernel() < (6, 12),
    reason="slices of a thread's own came with Linux 6.12",
)
def test_a_thread_gets_its_slice_and_those_it_starts_do_not() -> None:
    found: dict[str, tuple[int, int]] = {}

    def prompt() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        assert scheduling.wake_promptly()
        found["prompt"] = _attributes()
        child = threading.Thread(target=lambda: found.update(child=_attributes()))
        child.start()
        child.join()

    thread = threading.Thread(target=prompt)
    thread.start()
    thread.join()
    assert found["prompt"] == (5, scheduling.SLICE_NS)
    assert found["child"][1] != scheduling.SLICE_NS


def test_where_the_system_has_no_such_call_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "z80")
    assert not scheduling.wake_promptly()


def test_a_thread_that_may_not_ask_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_pid: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "sched_getscheduler", refused)
    assert not scheduling.wake_promptly()
