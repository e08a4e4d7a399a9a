"""How long a newcomer takes from `git clone` to the first consumed record, and what is installed until then.

    python3 tools/first_record.py [--repository PLACE] [--commit COMMIT] [--python PYTHON]

Clones the repository into a temporary directory and does what README.md says, with an empty cache of pip: `make up`,
and when that is ready create a topic, produce three records and consume them. Printed: the seconds after which each
step was done, and the megabytes of `.venv`. Ports are those of the README, so nothing else may listen on
127.0.0.1:9092. It runs before anything is installed.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

READY = "ready bootstrap="
READY_S = 1_800.0
"""How long `make up` may install and start: a slow network and a small machine."""
STOP_S = 60.0
COMMAND_S = 60.0
COMMANDS = (
    "tidelog topic create hello --partitions 3",
    r"printf 'one\ntwo\nthree\n' | tidelog produce hello",
    "tidelog consume hello --from-beginning --max-records 3",
)


def megabytes(directory: Path) -> float:
    """The bytes of all files below `directory`, in MB."""
    files = (Path(folder) / name for folder, _, names in os.walk(directory) for name in names)
    return sum(file.lstat().st_size for file in files) / 1e6


def wait_until_ready(server: subprocess.Popen[str]) -> None:
    """Read what `make up` prints until it says that it is ready. Raises RuntimeError with the output if it does not."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert server.stdout is not None
        for line in server.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    output: list[str] = []
    deadline = time.monotonic() + READY_S
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            line = None
        if line is None:
            raise RuntimeError(f"`make up` was not ready:\n{''.join(output[-30:])}")
        output.append(line)
        if line.startswith(READY):
            return


def stop(server: subprocess.Popen[str]) -> None:
    """Ctrl-C for all that `make up` started."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGINT)
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def measure(place: str, commit: str, python: str, scratch: Path) -> None:
    """Do it once below `scratch`, and print each step when it is done."""
    clone, cache = scratch / "tidelog", scratch / "pip-cache"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PIP_CACHE_DIR": str(cache), "PYTHON": python}
    started = time.monotonic()

    def done(step: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {step}", flush=True)

    subprocess.run(["git", "clone", "--quiet", place, str(clone)], check=True)
    subprocess.run(["git", "-C", str(clone), "checkout", "--quiet", commit], check=True)
    done(f"cloned, at {commit}")
    server = subprocess.Popen(
        ["make", "up"],
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until_ready(server)
        done("`make up` is ready")
        for command in COMMANDS:
            script = f". .venv/bin/activate && {command}"
            subprocess.run(["bash", "-c", script], cwd=clone, env=environment, check=True, timeout=COMMAND_S)
            done(command)
    finally:
        stop(server)
    print(f"{megabytes(clone / '.venv'):7.0f} MB in .venv")


def main() -> int:
    """Measure once, with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", default=str(Path(__file__).parents[1]), help="what is cloned (default: this)")
    parser.add_argument("--commit", default="HEAD", help="what is checked out (default: HEAD)")
    parser.add_argument("--python", default="python3", help="for PYTHON of the Makefile (default: python3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidelog-first-record-") as scratch:
        measure(args.repository, args.commit, args.python, Path(scratch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
