"""The server follows a run, listens on this machine alone, and answers no foreign page."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from framework.errors import UsageError
from framework.report.page import page
from framework.report.records import read_run
from framework.report.serve import make_server
from tests.report.made_runs import point, write_run


@contextmanager
def served(folder: Path) -> Iterator[int]:
    server = make_server(lambda: page([read_run(folder)], refresh_seconds=10), port=0)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        assert server.server_address[0] == "127.0.0.1"
        yield server.server_port
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()


def get(port: int, path: str = "/", *, host: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_every_request_reads_the_run_anew(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with served(folder) as port:
        status, text = get(port)
        assert (status, "Finished after 100 steps" in text) == (200, True)
        assert '<meta http-equiv="refresh" content="10">' in text
        with (folder / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps(point(120, train__loss=0.1)) + "\n")
        assert "Finished after 120 steps" in get(port)[1]
        (folder / "metrics.jsonl").unlink()
        assert "metrics.jsonl is missing" in get(port, "/?again")[1]


def test_a_run_that_is_gone_is_named_and_may_come_back(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<b>run")
    with served(folder) as port:
        folder.rename(tmp_path / "elsewhere")
        status, text = get(port)
        assert status == 500
        assert "[run-not-found]" in text
        assert "<b>" not in text
        (tmp_path / "elsewhere").rename(folder)
        assert get(port)[0] == 200


def test_other_paths_and_other_names_get_nothing(tmp_path: Path) -> None:
    with served(write_run(tmp_path / "run")) as port:
        assert get(port, "/../../etc/passwd")[0] == 404
        assert get(port, host="evil.example")[0] == 403
        assert get(port, host=f"evil.example:{port}")[0] == 403
        assert get(port, host=f"localhost:{port}")[0] == 200


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with (
        served(write_run(tmp_path / "run")) as port,
        pytest.raises(UsageError, match=f"--port {port}: it cannot"),
    ):
        make_server(str, port=port)
