"""A run's page on this machine while it trains: `headrace watch`.

The page is that of `headrace report`, in a frame that is loaded again when a file of the run has
changed: the browser asks every second. The server only reads, listens on the loopback address only,
and answers no other site's requests.
"""

from __future__ import annotations

import threading
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from headrace.errors import HeadraceError, ReportError
from headrace.report.writing import render

HOST = "127.0.0.1"
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
let top_ = 0, seen = null;
frame.addEventListener("load", () => frame.contentWindow.scrollTo(0, top_));
setInterval(async () => {{
  const state = await fetch("/state").then(answer => answer.text(), () => seen);
  if (seen !== null && state !== seen) {{
    top_ = frame.contentWindow.scrollY;
    frame.contentWindow.location.reload();
  }}
  seen = state;
}}, 1000);
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

    def __init__(self, source: Path, port: int = 0) -> None:
        if not source.exists():
            raise ReportError(f"{source}: no such run or result")
        self._stopped = threading.Event()
        handler = type("Handler", (_Handler,), {"run": _WatchedRun(source)})
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

    def __init__(self, source: Path) -> None:
        self.title = f"{source.resolve().name} – Headrace"
        self._source = source

    def page(self) -> str:
        """The report as it is now, or why there is none yet."""
        try:
            return render(self._source)
        except HeadraceError as problem:
            return _EMPTY.format(title=escape(self.title), reason=escape(str(problem)))

    def state(self) -> str:
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
        return repr(found)


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
        elif self.path == "/state":
            self._answer(HTTPStatus.OK, "text/plain", self.run.state())
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
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *given: Any) -> None:
        """Say nothing: the terminal is the user's."""
