"""Runs every benchmark of this folder, one after the other, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    wanted = sys.argv[1:]
    names = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))
    unknown = set(wanted) - set(names)
    if unknown:
        print(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(names)}", file=sys.stderr)
        return 2
    failed = 0
    for name in wanted or names:
        print(f"== {name}", flush=True)
        failed += subprocess.run([sys.executable, "-m", f"bench.{name}"], cwd=HERE.parent, check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
