"""The server of the live page: who may read, what is refused, and when the server ends."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotloop.errors import RunError
from hotloop.report.live_server import LiveServer, listen, page_address
from tests.support.stored_runs import write_run

TOKEN = "secret"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    write_run(folder / "runs/first", epochs=[{"epoch": 1, "step": 4, "train_loss": 0.5}])
    found = LiveServer(listen(), TOKEN, folder / "runs", idle_s=5.0)
    thread = threading.Thread(target=found.serve)
    thread.start()
    yield found
    thread.join(60)
    assert not thread.is_alive()  # it ends by itself


def get(server: LiveServer, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str]:
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_only_the_address_with_the_token_is_answered(server: LiveServer) -> None:
    assert get(server, f"/?token={TOKEN}")[0] == 200
    for path in ("/", "/?token=", "/?token=secre", "/events", "/plotly.js", "/report?run=first", f"/?token={TOKEN}x"):
        assert get(server, path)[0] == 403, path
    assert get(server, f"/../run.json?token={TOKEN}")[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1:1", "", "10.1.2.3:{port}", "[::1"])
def test_another_host_is_refused(server: LiveServer, host: str) -> None:
    assert get(server, f"/?token={TOKEN}", host.format(port=server.server_address[1]) or "x")[0] == 403


def test_localhost_is_this_host(server: LiveServer) -> None:
    assert get(server, f"/?token={TOKEN}", f"localhost:{server.server_address[1]}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_only_reads(server: LiveServer, method: str) -> None:
    assert get(server, f"/?token={TOKEN}", method=method)[0] == 501


def test_reports_are_of_the_runs_of_the_page_alone(server: LiveServer, folder: Path) -> None:
    write_run(folder / "other")
    status, page = get(server, f"/report?token={TOKEN}&run={folder}/runs/first")
    assert status == 200 and "tiny" in page
    assert get(server, f"/report?token={TOKEN}&run={folder}/other")[0] == 404


def test_an_open_page_gets_changes_and_heartbeats_and_delays_the_end(
    server: LiveServer, folder: Path, monkeypatch
) -> None:
    monkeypatch.setattr("hotloop.report.live_server.HEARTBEAT_S", 1.5)
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request("GET", f"/events?token={TOKEN}")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"].startswith("text/event-stream")

    def event() -> tuple[str, dict]:
        while not (line := answer.readline()).startswith(b"event: "):
            assert line, "the stream ended"
        return line[7:].decode().strip(), json.loads(answer.readline()[6:])

    kind, found = event()
    assert kind == "runs" and [run["epochs"] for run in found["runs"]] == [1]
    assert [event()[0] for _ in range(4)] == ["heartbeat"] * 4  # longer than idle_s
    with (folder / "runs/first/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": 2, "step": 8, "train_loss": 0.25}) + "\n")
    while kind != "runs" or found["runs"][0]["epochs"] != 2:
        kind, found = event()
    answer.close()
    connection.close()


def test_a_port_that_is_taken_is_one_line() -> None:
    with listen() as taken, pytest.raises(RunError, match=r"can.t be served on .*another port"):
        listen(port=taken.getsockname()[1])


def test_two_pages_at_once_have_ports_of_their_own() -> None:
    with listen() as first, listen() as second:
        assert page_address(first, "a").split("/?")[0] != page_address(second, "a").split("/?")[0]
