"""A run's page on this machine while it trains: `headrace watch`.

The page is that of `headrace report`, in a frame that is loaded again when a file of the run has
changed. The browser learns that by server-sent events. The server only reads, listens on the
loopback address only, and answers no other site's requests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from headrace.errors import HeadraceError, ReportError
from headrace.report.writing import render

HOST = "127.0.0.1"
#: How often files are looked at, and how often an idle connection is tried.
_LOOK_S, _KEEP_ALIVE_S = 1.0, 15.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
}
#: The page scrolls back to where it was, and keeps a run's page that has ended.
_FRAME = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
html, body, iframe {{ margin: 0; width: 100%; height: 100%; border: 0; display: block; }}
</style>
</head>
<body>
<iframe title="{title}" src="/page"></iframe>
<script>
const frame = document.querySelector("iframe");
let top_ = 0;
frame.addEventListener("load", () => frame.contentWindow.scrollTo(0, top_));
new EventSource("/events").addEventListener("changed", () => {{
  top_ = frame.contentWindow.scrollY;
  frame.contentWindow.location.reload();
}});
</script>
</body>
</html>
"""
_EMPTY = """\
<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>
<body><p>There is no report yet: {reason}</p></body></html>
"""


class LiveServer:
    """Serves the page of a run folder or a result file, until it is closed.

    with LiveServer(Path("runs/train/exp")) as server:
        print(server.url)
        server.wait()
    """

    def __init__(self, source: Path, port: int = 0, look_s: float = _LOOK_S) -> None:
        if not source.exists():
            raise ReportError(f"{source}: no such run or result")
        self._stopped = threading.Event()
        handler = type("Handler", (_Handler,), {"run": _WatchedRun(source, look_s, self._stopped)})
        try:
            self._server = ThreadingHTTPServer((HOST, port), handler)
        except OSError as problem:
            raise ReportError(f"port {port}: cannot be used ({problem.strerror})") from problem
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="headrace watch", daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._server.server_address[1]}/"

    def __enter__(self) -> LiveServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait(self) -> None:
        """Serve until the program is interrupted."""
        self._stopped.wait()


class _WatchedRun:
    """The run that is watched, and when its files last changed."""

    def __init__(self, source: Path, look_s: float, stopped: threading.Event) -> None:
        self.title = f"{source.resolve().name} – Headrace"
        self._source, self._look_s, self._stopped = source, look_s, stopped

    def page(self) -> str:
        """The report as it is now, or why there is none yet."""
        try:
            return render(self._source)
        except HeadraceError as problem:
            return _EMPTY.format(title=escape(self.title), reason=escape(str(problem)))

    def changes(self) -> Iterator[bool]:
        """True after each change of the files, False now and then without one, until the server
        stops."""
        seen, idle_s = self._state(), 0.0
        while not self._stopped.wait(self._look_s):
            state = self._state()
            idle_s += self._look_s
            if state != seen:
                seen, idle_s = state, 0.0
                yield True
            elif idle_s >= _KEEP_ALIVE_S:
                idle_s = 0.0
                yield False

    def _state(self) -> list[tuple[str, int, int]]:
        """Name, size and time of each file, without those of its folders."""
        folder = self._source.is_dir()
        found = []
        for path in sorted(self._source.iterdir()) if folder else [self._source]:
            try:
                stat = path.stat()
            except OSError:  # it has just been replaced or removed
                continue
            if path.is_file() and path.suffix != ".html":  # a report is written of the rest
                found.append((path.name, stat.st_size, stat.st_mtime_ns))
        return found


class _Handler(BaseHTTPRequestHandler):
    """Answers a browser on this machine."""

    run: ClassVar[_WatchedRun]
    server_version, sys_version = "headrace", ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if not self._is_own():
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "only this machine's own page\n")
        elif self.path == "/":
            self._answer(HTTPStatus.OK, "text/html", _FRAME.format(title=escape(self.run.title)))
        elif self.path == "/page":
            self._answer(HTTPStatus.OK, "text/html", self.run.page())
        elif self.path == "/events":
            self._tell_changes()
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "no such page\n")

    do_HEAD = do_GET  # noqa: N815

    def _is_own(self) -> bool:
        """Whether the request is for this address, and not from another site. A site whose name was
        made to point here sends its own name as the host."""
        port = self.server.server_address[1]  # type: ignore[index]
        hosts = {f"{HOST}:{port}", f"localhost:{port}"}
        origin = self.headers.get("Origin")
        return (
            self.headers.get("Host") in hosts
            and (origin is None or origin in {f"http://{host}" for host in hosts})
            and self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
        )

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode(errors="replace")
        self._begin(status, kind, str(len(body)))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _begin(self, status: HTTPStatus, kind: str, length: str | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if length is not None:
            self.send_header("Content-Length", length)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    def _tell_changes(self) -> None:
        self.close_connection = True
        self._begin(HTTPStatus.OK, "text/event-stream", None)
        if self.command == "HEAD":
            return
        try:
            self.wfile.write(b": watching\n\n")
            for has_changed in self.run.changes():
                self.wfile.write(b"event: changed\ndata:\n\n" if has_changed else b": idle\n\n")
        except ConnectionError:  # the browser has gone
            return

    def log_message(self, *given: Any) -> None:
        """Say nothing: the terminal is the user's."""
