"""Structured logs: one event per line, with the ids that it concerns.

Modules log through the standard library: `log.info("object committed", extra={"object": 7, "stream": 3})`. The text is
constant; variable values are in `extra`, so that lines can be searched by field. `configure` selects the rendering:
`text` for people (`12:00:00.123 INFO storage.upload object committed object=7 stream=3`) or `json` for machines.
Nothing logs in a hot loop, and nobody who logs waits for who reads the log (`tidelog.runtime.lines`).

Invariant: what a client has chosen, such as a path or a transactional id, neither begins a line that looks like an
event nor commands a terminal: in `text` it is escaped, and the lines of a traceback are indented.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal, TextIO

from tidelog.runtime.lines import LineWriter, writer_for
from tidelog.runtime.text import printable

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class TextFormatter(logging.Formatter):
    """Formats a line for people: time (local, milliseconds), level, logger, event, fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = printable(f"{record.levelname} {record.name} {record.getMessage()}{fields}")
        trace = self.formatException(record.exc_info).split("\n") if record.exc_info else []
        return "\n".join([f"{clock}.{int(record.msecs):03d} {line}", *(f"    {printable(each)}" for each in trace)])


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: `time_ms`, `level`, `logger`, `event`, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        body: dict[str, object] = {
            "time_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str)


class LineHandler(logging.Handler):
    """Hands lines to a `LineWriter`: who logs does not wait for who reads the log."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer
        writer.dropped_text = self._dropped_text

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record."""
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001  # as in every handler of `logging`
            self.handleError(record)
        else:
            self._writer.write(text + "\n")

    def flush(self) -> None:
        """Wait for a bounded time until what was logged is written."""
        self._writer.flush()

    def _dropped_text(self, lines: int) -> str:
        text = "lines of the log were dropped here: nobody took them"
        record = logging.makeLogRecord({"name": __name__, "levelname": "WARNING", "msg": text, "lines": lines})
        return self.format(record) + "\n"


def configure(level: str = "info", style: Literal["text", "json"] = "text", stream: TextIO | None = None) -> None:
    """Send all logs to `stream` (default: standard error) at `level` and above."""
    target = stream or sys.stderr
    writer = writer_for(target)
    handler = logging.StreamHandler(target) if writer is None else LineHandler(writer)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("botocore", "aiobotocore", "urllib3", "pysyncobj", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
