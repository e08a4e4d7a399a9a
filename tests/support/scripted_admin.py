"""The admin HTTP of a broker whose answers a test makes, for commands that meet an odd one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

POLL_S = 0.01
Answer = Callable[[str, str, bytes], tuple[int, bytes]]
"""`(method, path, body)`: the status and the body."""


@contextlib.contextmanager
def scripted_admin(answer: Answer) -> Iterator[str]:
    """Serve at a free port; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply()

        def do_POST(self) -> None:
            self.reply()

        def reply(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            status, body = answer(self.command, self.path, self.rfile.read(length))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
