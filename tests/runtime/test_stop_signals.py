"""Signals reach the thread that waits for them, whatever other threads the process has."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

TIMEOUT_S = 60
PROGRAM = """
import asyncio, os, signal, sys, threading

if sys.argv[1] == "hook":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
from tidelog.runtime.stop_signals import OnSignal, StopSignals
import uvloop

signals = StopSignals(signal.SIGTERM, signal.SIGUSR1)
if sys.argv[2] == "early":
    os.kill(os.getpid(), signal.SIGTERM)

async def main():
    stopped, told = asyncio.Event(), asyncio.Event()
    signals.serve(asyncio.get_running_loop(), {
        signal.SIGTERM: OnSignal(stopped.set), signal.SIGUSR1: OnSignal(told.set)
    })
    print("ready", flush=True)
    if sys.argv[2] != "early":
        await told.wait()
        print("told", flush=True)
    await stopped.wait()
    print("stopped", flush=True)

uvloop.run(main())
"""


@pytest.mark.parametrize("when", ["early", "later"])
@pytest.mark.parametrize("threads", ["none", "hook"])
def test_a_thread_that_was_there_before_does_not_take_signals_away(threads: str, when: str) -> None:
    command = [sys.executable, "-c", PROGRAM, threads, when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            if when == "later":
                process.send_signal(signal.SIGUSR1)
                assert process.stdout.readline() == "told\n"
                process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "stopped\n"
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()
