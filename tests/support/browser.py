"""A real browser for tests of pages: Chromium by the WebDriver protocol, without a further library.

    with Browser(tools) as browser:
        browser.open("http://127.0.0.1:9644/console/", 390, 844)
        browser.wait("document.querySelector('h1')", "the page is drawn")

`tools` is the folder of `localstack/install.py browser`: `chromium`, `chromedriver` and `axe.min.js`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.clients import wait_until
from tests.support.ports import free_port

COMMAND_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
)
AXE_RUN = """
const done = arguments[arguments.length - 1];
axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}).then(
  (found) => done(found.violations.map((each) => ({
    rule: each.id, impact: each.impact, help: each.help,
    nodes: each.nodes.slice(0, 5).map((node) => `${node.html.slice(0, 200)} | ${node.failureSummary}`),
  }))),
  (error) => done([{rule: "axe", impact: String(error), help: "", nodes: []}]));
"""


class Browser:
    """One browser with one tab."""

    def __init__(self, tools: Path, *, dark: bool = False) -> None:
        self._tools = tools
        self._dark = dark
        self._port = free_port()
        self._session = ""

    def __enter__(self) -> Self:
        self._driver = subprocess.Popen(
            [str(self._tools / "chromedriver"), f"--port={self._port}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(self._is_up, "chromedriver answers", 30)
            options = {"binary": str((self._tools / "chromium").resolve()), "args": list(FLAGS)}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            self._session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        except BaseException:
            self._end_driver()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._call("DELETE", self._path(""))
        self._end_driver()

    def _end_driver(self) -> None:
        self._driver.terminate()
        try:
            self._driver.wait(20)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait(20)

    def _is_up(self) -> bool:
        try:
            return bool(self._call("GET", "/status")["ready"])
        except OSError:
            return False

    def _path(self, rest: str) -> str:
        return f"/session/{self._session}{rest}"

    def _call(self, method: str, path: str, body: object = None) -> Any:
        data = None if method in ("GET", "DELETE") else json.dumps(body or {}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=COMMAND_S) as response:
                return json.loads(response.read())["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{method} {path}: {error.read().decode()[:2000]}") from None

    def devtools(self, command: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return self._call("POST", self._path("/goog/cdp/execute"), {"cmd": command, "params": parameters})

    def size(self, width: int, height: int) -> None:
        """Give the page this size; a narrow one is that of a phone."""
        mobile = width < 600
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )
        self.devtools("Emulation.setTouchEmulationEnabled", enabled=mobile)
        theme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.devtools("Emulation.setEmulatedMedia", features=[theme, motion])

    def open(self, url: str, width: int = 1280, height: int = 800) -> None:
        """Load a page. The same address with another fragment loads nothing anew, as in a browser."""
        self.size(width, height)
        self._call("POST", self._path("/url"), {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page; returns what it returns."""
        return self._call("POST", self._path("/execute/sync"), {"script": script, "args": list(arguments)})

    def run_async(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript that calls its last argument with its result."""
        return self._call("POST", self._path("/execute/async"), {"script": script, "args": list(arguments)})

    def wait(self, expression: str, what: str, timeout_s: float = 30.0) -> Any:
        """Wait until a JavaScript expression is true in the page; returns its value."""
        try:
            wait_until(lambda: bool(self.run(f"return Boolean({expression})")), what, timeout_s)
        except AssertionError as error:
            shown = self.run("return document.body.innerText.slice(0, 3000)")
            raise AssertionError(f"{error}\n{shown}\n{self.complaints()}") from None
        return self.run(f"return {expression}")

    def text(self) -> str:
        """Return the text that the page shows."""
        return str(self.run("return document.body.innerText"))

    def press(self, key: str) -> None:
        """Press and release a key: a character, or a code of the WebDriver protocol such as `\\ue004` (Tab)."""
        steps = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        actions = [{"type": "key", "id": "keyboard", "actions": steps}]
        self._call("POST", self._path("/actions"), {"actions": actions})

    def complaints(self) -> list[str]:
        """Return the errors and warnings of the page since the last call: of scripts, and of its policy."""
        entries = self._call("POST", self._path("/se/log"), {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def axe(self) -> list[dict[str, Any]]:
        """Return what axe-core finds against the rules of accessibility."""
        if not self.run("return typeof axe === 'object'"):
            self.devtools("Runtime.evaluate", expression=(self._tools / "axe.min.js").read_text(encoding="utf-8"))
        found: list[dict[str, Any]] = self.run_async(AXE_RUN)
        return found

    def picture(self, *, whole: bool = False) -> bytes:
        """Return a PNG of what is visible, or of the whole page."""
        more: dict[str, Any] = {}
        if whole:
            size = self.devtools("Page.getLayoutMetrics")["cssContentSize"]
            more["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **more)
        return base64.b64decode(shot["data"])
