"""Pictures of the console's pages for docs/console.md: a cluster under load with a broker killed and moves going on.

    python -m tests.harness.console_pictures [FOLDER] [--seconds 240] [--only PAGE…]

Writes FOLDER/PAGE.png (1280 × 800, light) and FOLDER/PAGE-phone.png (390 × 844, dark), at most `MAX_BYTES` each, with a
palette of 256 colours. Needs the browser of `localstack/install.py browser`, and Pillow in the environment.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path

from localstack.install import install
from tests.e2e.test_console_in_browser import KILLED, PAGES, READY, sign_in
from tests.support.browser import Browser
from tests.support.console_world import ConsoleWorld, console_world

MAX_BYTES = 150_000
SIZES = {"": (1280, 800, False), "-phone": (390, 844, True)}


def optimized(png: bytes) -> bytes:
    """The picture with a palette."""
    from PIL import Image  # type: ignore[import-not-found, unused-ignore]

    with Image.open(io.BytesIO(png)) as picture:
        reduced = picture.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        target = io.BytesIO()
        reduced.save(target, "PNG", optimize=True)
    return target.getvalue()


def take(world: ConsoleWorld, folder: Path, only: list[str]) -> list[str]:
    """Take all pictures; return what is wrong with them."""
    wrong = []
    for suffix, (width, height, dark) in SIZES.items():
        with Browser(Path(install("browser")), dark=dark) as browser:
            sign_in(browser, world, width, height)
            for page, (address, drawn, _) in PAGES.items():
                if only and page not in only:
                    continue
                if page == "moves":
                    world.move_now()
                browser.run("location.hash = arguments[0]", address)
                browser.wait(f"{READY} && {drawn}", f"{page} is drawn", 60)
                png = optimized(browser.picture())
                (folder / f"{page}{suffix}.png").write_bytes(png)
                if len(png) > MAX_BYTES:
                    wrong.append(f"{page}{suffix}.png has {len(png)} bytes")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs/images/console"))
    parser.add_argument("--seconds", type=float, default=240.0, help="how long the load goes on before")
    parser.add_argument("--only", nargs="*", default=[], metavar="PAGE")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, console_world(Path(directory)) as world:
        world.wait_history(given.seconds)
        for partition in range(6):
            world.move("orders", partition, 2)
        world.move("clicks", 0, KILLED)
        world.kill(KILLED)
        wrong = take(world, given.folder, given.only)
    print("\n".join(wrong) or "all pictures taken")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
