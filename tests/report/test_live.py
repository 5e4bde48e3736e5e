"""`headrace watch`: a run's page for a browser on this machine, and for nobody else."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import ReportError
from headrace.report import LiveServer, render
from support.report_samples import run_sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_sample(tmp_path_factory.mktemp("run") / "exp", steps=40, finished=False)


@pytest.fixture
def server(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(folder) as found:
        yield found


def asked(
    server: LiveServer, path: str, method: str = "GET", **headers: str
) -> http.client.HTTPResponse:
    host = server.url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(host, timeout=30)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=named)
    return connection.getresponse()


def test_the_page_is_that_of_the_report_in_a_frame(server: LiveServer, folder: Path) -> None:
    frame = asked(server, "/")
    assert frame.status == 200
    assert frame.headers["Cache-Control"] == "no-store"
    text = frame.read().decode()
    assert '<iframe title="exp – Headrace" src="/page">' in text
    assert 'fetch("/state")' in text
    page = asked(server, "/page").read().decode()
    assert page.startswith("<!doctype html>")
    assert len(page) == pytest.approx(len(render(folder)), rel=0.01)


def test_a_change_of_the_run_is_another_state(server: LiveServer, folder: Path) -> None:
    before = asked(server, "/state").read()
    (folder / "report.html").write_text("a report is no change")
    assert asked(server, "/state").read() == before
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n")
    assert asked(server, "/state").read() != before


@pytest.mark.parametrize("path", ["/", "/page", "/state"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "attacker.example"},
        {"Host": "attacker.example:80"},
        {"Origin": "http://attacker.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_other_sites_get_nothing(server: LiveServer, path: str, headers: dict[str, str]) -> None:
    answer = asked(server, path, **headers)
    assert answer.status == 403
    assert answer.read() == b"only this machine's own page\n"
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_the_page_itself_may_ask(server: LiveServer) -> None:
    origin = server.url.rstrip("/")
    assert asked(server, "/page", Origin=origin, Sec_Fetch_Site="same-origin").status == 200
    local = origin.replace("127.0.0.1", "localhost")
    assert asked(server, "/page", Host=local.removeprefix("http://"), Origin=local).status == 200


def test_nothing_can_be_written_and_no_file_be_read(server: LiveServer) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert asked(server, "/page", method).status == 501
    for path in ("/metrics.jsonl", "/../../etc/passwd", "/page?x=1", "/page/"):
        assert asked(server, path).status == 404
    head = asked(server, "/page", "HEAD")
    assert (head.status, head.read()) == (200, b"")


def test_only_the_loopback_address_is_listened_on(server: LiveServer) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    assert server._server.server_address[0] == "127.0.0.1"


def test_a_run_that_has_written_nothing_yet_says_so(tmp_path: Path) -> None:
    with LiveServer(tmp_path) as server:
        text = asked(server, "/page").read().decode()
    assert "There is no report yet: " in text


def test_closing_ends_the_waiting(folder: Path) -> None:
    server = LiveServer(folder)
    with server:
        waiting = threading.Thread(target=server.wait)
        waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()


def test_what_cannot_be_watched_is_an_error(tmp_path: Path, server: LiveServer) -> None:
    with pytest.raises(ReportError, match="no such run or result"):
        LiveServer(tmp_path / "none")
    taken = server._server.server_address[1]
    with pytest.raises(ReportError, match=f"port {taken}: cannot be used"):
        LiveServer(tmp_path, port=taken)
