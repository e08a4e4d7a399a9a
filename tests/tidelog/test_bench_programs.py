"""`python -m bench` leaves nothing behind of a program, however that ends (`bench._programs`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bench._common import directory

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
    import os, subprocess, sys, tempfile, time
    from bench._common import memory_directory
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    grandchild = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, time; subprocess.Popen(['sleep', '601']); time.sleep(600)"],
        start_new_session=True,
    )
    on_disk = tempfile.mkdtemp()
    in_memory = memory_directory()
    for folder in (on_disk, in_memory):
        if folder is not None:
            with open(os.path.join(folder, "file"), "w") as file:
                file.write("x")
    while not (kids := open(f"/proc/{grandchild.pid}/task/{grandchild.pid}/children").read().split()):
        time.sleep(0.01)
    with open(sys.argv[1] + ".part", "w") as report:
        report.write(f'{{"pids": [{child.pid}, {grandchild.pid}, {kids[0]}], "files": ["{on_disk}", "{in_memory}"]}}')
    os.rename(sys.argv[1] + ".part", sys.argv[1])
    if sys.argv[2] == "hang":
        time.sleep(600)
    sys.exit(int(sys.argv[2]))
"""
RUNNER = """
    import os, sys
    from pathlib import Path
    from bench._programs import run
    command = [sys.executable, "-c", sys.argv[1], sys.argv[2], sys.argv[3]]
    print(run(command, cwd=Path.cwd(), environment=dict(os.environ), limit_s=float(sys.argv[4])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("ends", "limit_s", "answer"), [("hang", "8", "None"), ("3", "60", "3"), ("0", "60", "0")])
def test_no_process_and_no_file_stays(tmp_path: Path, ends: str, limit_s: str, answer: str) -> None:
    report = tmp_path / "report"
    arguments = [textwrap.dedent(PROGRAM), str(report), ends, limit_s]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUNNER), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == answer, done.stderr
    assert not done.stderr
    found = json.loads(report.read_text())
    assert len(found["pids"]) == 3
    for pid in found["pids"]:
        assert not Path(f"/proc/{pid}").exists()
    for path in found["files"]:
        assert not os.path.exists(path)


def test_the_directory_of_a_running_program_whose_pid_nobody_here_sees_stays(tmp_path: Path) -> None:
    """As that of one in another pid namespace. One that nobody uses goes, though another process has its pid by now."""
    program = (
        "import os, sys\n"
        "os.getpid = lambda: 99_999_999\n"
        "from bench._common import directory\n"
        "with directory(sys.argv[1]) as path:\n"
        "    print(path, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    running = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        used = Path(running.stdout.readline().strip())
        assert "99999999" in used.name and used.is_dir()
        unused = tmp_path / f"tidelog-bench-{os.getpid()}-left"
        unused.mkdir()
        of_others = tmp_path / "tidelog-bench-1-of-others"
        of_others.symlink_to(ROOT, target_is_directory=True)
        with directory(str(tmp_path)) as path:
            assert set(tmp_path.iterdir()) == {path, used, of_others}
        assert set(tmp_path.iterdir()) == {used, of_others}
        running.communicate(timeout=30)
        assert set(tmp_path.iterdir()) == {of_others}
    finally:
        running.kill()
        running.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_run_by_hand_leaves_no_directory_longer_than_until_the_next_run(
    number: signal.Signals, tmp_path: Path
) -> None:
    program = (
        "import sys, time\n"
        "from bench._common import directory\n"
        "with directory(sys.argv[1]) as path:\n"
        "    (path / 'file').write_text('x')\n"
        "    print(path, flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    killed = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    going_on = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert killed.stdout is not None and going_on.stdout is not None
        left, other = Path(killed.stdout.readline().strip()), Path(going_on.stdout.readline().strip())
        assert (left / "file").exists() and left.parent == tmp_path
        killed.send_signal(number)
        killed.wait(30)
        assert left.exists() == (number == signal.SIGKILL)
        with directory(str(tmp_path)) as path:
            assert set(tmp_path.iterdir()) == {path, other}
        assert set(tmp_path.iterdir()) == {other}
    finally:
        for process in (killed, going_on):
            process.kill()
            process.communicate()
