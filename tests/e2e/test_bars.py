"""The bars of operations that take seconds, as a terminal gets them: the real commands on a pseudo-terminal, over a
bucket that answers slowly."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from pathlib import Path

import pytest

from tests.e2e.backends import create_topic, faulty_proxy, s3_flags
from tests.e2e.test_rebuild import SOON, metadata_written
from tests.e2e.test_wipe import PARTITIONS, TOPIC, fill, upload_everything
from tests.support.s3_servers import S3Server
from tests.support.tidelog_process import running
from tidelog.chaos.faulty_s3 import Fault
from tidelog.runtime.children import TIDELOG
from tidelog.runtime.progress_bar import ERASE

pytestmark = [pytest.mark.processes, pytest.mark.long]

TIMEOUT_S = 240
SLOW = Fault(delay_s=0.7)
A_BAR = r"{label}  .*(\d+% .*(left|/s|each)|\d:\d\d)"


def on_a_terminal(*command: str | Path) -> tuple[str, str]:
    """Run a command whose standard error is a terminal; return what that got, and standard output."""
    ours, theirs = os.openpty()
    got = bytearray()

    def read() -> None:
        while True:
            try:
                got.extend(os.read(ours, 1 << 16))
            except OSError:  # nobody has the other end open any more
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    try:
        done = subprocess.run(
            [*TIDELOG, *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=environment,
            timeout=TIMEOUT_S,
            check=False,
        )
    finally:
        os.close(theirs)
        reader.join(30)
        os.close(ours)
    text = got.decode()
    assert done.returncode == 0, text + done.stdout.decode()
    return text, done.stdout.decode()


def has_bar(text: str, label: str) -> bool:
    """Whether a bar with this label was drawn, with what it says, and taken away at the end."""
    drawn = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.split(ERASE)]
    return any(re.match(A_BAR.format(label=label), line) for line in drawn) and not drawn[-1].startswith(label)


def test_a_slow_bucket_has_bars_for_each_operation_on_all_of_it(tmp_path: Path, moto_server: S3Server) -> None:
    with faulty_proxy(moto_server) as proxy:
        flags = s3_flags(proxy.server)
        with running(tmp_path / "data", [*flags, *SOON]) as process:
            create_topic(process.bootstrap, TOPIC, PARTITIONS)
            for _ in range(3):
                fill(process.bootstrap)
                upload_everything(process.bootstrap)
            metadata_written(process)
            proxy.fault = lambda seen: SLOW if seen.method == "GET" and "/objects/" in seen.path else None
            text, _ = on_a_terminal("object", "verify", "--bootstrap", process.bootstrap)
            assert has_bar(text, "verifying"), text
            proxy.fault = lambda seen: None
            assert process.stop() == 0, process.tail()
        proxy.fault = lambda seen: SLOW if seen.method in ("GET", "PUT") else None
        place, keys = tmp_path / "backup", flags[flags.index("--set") :]
        text, _ = on_a_terminal("cluster", "backup", "--data-dir", tmp_path / "data", "--to", place, *flags)
        assert has_bar(text, "copying"), text
        text, _ = on_a_terminal("cluster", "rebuild", "--data-dir", tmp_path / "planned", "--dry-run", *flags)
        assert has_bar(text, "reading"), text
        other = ["--s3-endpoint", proxy.server.endpoint, "--bucket", "restored-bars", *keys]
        restore: list[str | Path] = ["cluster", "restore", "--from", place, "--data-dir", tmp_path / "new", "--yes"]
        text, said = on_a_terminal(*restore, *other)
        assert has_bar(text, "copying") and has_bar(text, "reading"), text
        assert "\x1b" not in said and "\r" not in said


def test_chaos_says_how_far_it_is(tmp_path: Path) -> None:
    history = tmp_path / "history"
    text, said = on_a_terminal("chaos", "--seconds", "8", "--faults", "kill", "--partitions", "3", "--history", history)
    assert has_bar(text, r"round \d+, kill"), text
    assert re.search(r"round \d+: kill", text), "the lines of the rounds are beside the bar"
    assert "every promise was kept" in said
