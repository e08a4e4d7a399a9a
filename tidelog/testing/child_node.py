"""`ChildNode`: a broker, with or without a controller, in a process of its own that runs what `tidelog serve` does.

It is what dies by `kill -9` and hangs by SIGSTOP. Its output, which is its log, is kept. It notices this process's
death by a pipe (`tidelog.runtime.children`) and stops; then its folder goes (`tidelog.testing.folder`).

Entry: `ChildNode`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tidelog.config import Config, to_toml
from tidelog.process.supervisor import FAILED_PREFIX, STOPPED_LINE
from tidelog.runtime.children import ParentPipe
from tidelog.testing.fault_board import FaultBoard
from tidelog.testing.forking import ChildStart, RunningChild, start_child
from tidelog.testing.options import BrokerEnded

START_S = 120.0
STOP_S = 60.0
TAIL_LINES = 30
"""Lines of its output that an error tells."""


class ChildSurroundings(NamedTuple):
    """What the processes of one context have in common."""

    folder: Path
    """Where configurations are written."""
    parent: ParentPipe
    board: FaultBoard
    inherited: tuple[int, ...]
    """Descriptors that they keep open."""


class ChildNode:
    """See the module. It may be started again after its end."""

    def __init__(self, config: Config, around: ChildSurroundings, on_line: Callable[[str], None]) -> None:
        """`on_line` is called with each line of its output, by a thread."""
        self._node_id = config.node.id
        file = around.folder / f"node-{self._node_id}.toml"
        file.touch(mode=0o600)
        file.write_text(to_toml(config), encoding="utf-8")
        self._start = ChildStart(file, around.parent.read_end, around.board.descriptor, around.inherited)
        self._around = around  # keeps the descriptors open
        self._process: RunningChild | None = None
        self._reader: threading.Thread | None = None
        self._told = threading.Event()
        self._halted = threading.Event()
        self._is_ready = False
        self._failure = ""
        self._paused = False
        self._asked = True
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def is_running(self) -> bool:
        """Whether its process has not ended; a paused one has not."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The pid of its last process."""
        assert self._process is not None, "not started"
        return self._process.pid

    def begin(self) -> None:
        """Begin to start; `wait_ready` waits for it."""
        assert not self.is_running
        self._told.clear()
        self._halted.clear()
        self._is_ready, self._failure, self._paused, self._asked = False, "", False, False
        self._process = start_child(self._start)
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True, name="tidelog-output")
        self._reader.start()

    def _read(self, process: RunningChild) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._take(line.rstrip())
        process.wait()
        self._told.set()
        self._halted.set()

    def _take(self, line: str) -> None:
        self._tail.append(line)
        self._on_line(line)
        if line.startswith("ready "):
            self._is_ready = True
            self._told.set()
        elif line.startswith(FAILED_PREFIX):
            self._failure = str(json.loads(line.removeprefix(FAILED_PREFIX))["error"])
        elif line == STOPPED_LINE:
            self._halted.set()

    def wait_ready(self) -> None:
        """Wait until clients can connect. Raises `BrokerEnded` with what it told."""
        if not self._told.wait(START_S):
            raise BrokerEnded(f"broker {self._node_id} was not ready within {START_S:g} s:\n{self._last()}")
        if not self._is_ready:
            self._join()
            raise BrokerEnded(f"broker {self._node_id} did not start: {self._failure or self._last()}")

    def halt(self) -> None:
        """Stop the broker in it, and not its controller; no effect if it is not running. `stop` comes after it."""
        if self.is_running and not self._asked:
            self.resume()
            self._signal(signal.SIGUSR1)
            self._halted.wait(STOP_S)

    def discard(self) -> None:
        """End it at once, because its files go, too. Raises `BrokerEnded` if it had ended by itself."""
        if self.is_running:
            self.kill()
        else:
            self.stop()

    def stop(self) -> None:
        """Stop it with SIGTERM; no effect if it is stopped or killed. Raises `BrokerEnded` if it ended by itself."""
        if self._process is None or self._asked:
            return
        self._asked = True
        if self.is_running:
            self.resume()
            self._signal(signal.SIGTERM)
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise BrokerEnded(f"broker {self._node_id} has not stopped within {STOP_S:g} s") from None
        self._join()
        if code != 0:
            raise BrokerEnded(f"broker {self._node_id} ended with {code}:\n{self._last()}")

    def kill(self) -> None:
        """End it with `kill -9`; no effect if it has ended."""
        self._asked = True
        if self._process is not None and self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._join()

    def pause(self) -> None:
        """Stop its process (SIGSTOP): it keeps its connections and answers nothing until `resume`."""
        if not self.is_running:
            raise BrokerEnded(f"broker {self._node_id} is not running")
        self._signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """Let a paused process go on; no effect on others."""
        if self._paused and self.is_running:
            self._signal(signal.SIGCONT)
        self._paused = False

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _join(self) -> None:
        if self._reader is not None:
            self._reader.join(STOP_S)

    def _last(self) -> str:
        return "\n".join(self._tail) or "it has written nothing"
