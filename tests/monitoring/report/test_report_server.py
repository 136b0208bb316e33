"""`--follow`: the page on loopback, and its data as the files are now."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
from support.launch import ROOT, environment
from support.prepare_command import hear_interrupts
from support.recorded import row

from pipeline.errors import PipelineError
from pipeline.monitoring.report.server import live_report


@pytest.fixture
def served(make_run):
    """(address, run directory)"""
    path = make_run(lines=[row(1)], finished=False)
    with live_report([path], 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", path
        server.shutdown()


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return answer.status, answer.read().decode()


def test_page_and_data(served):
    address, path = served
    code, page = get(address)
    assert code == 200
    assert '"live":true' in page

    def losses():
        data = json.loads(get(f"{address}data.json")[1])
        return data["runs"][0]["record"]["curves"]["train/loss"]["lines"][0]

    assert losses() == [5.0]
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(2)) + "\n")
    assert losses() == [5.0, 2.5]


def test_it_is_for_this_machine_alone(served):
    address, path = served
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(address[:-1].rpartition(":")[2])), timeout=10)
    for place, code in [("", 403), ("data.json", 403)]:
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(address + place, Host="evil.example")
        assert refused.value.code == code
    (path / "metrics.jsonl").write_text('{"step": 1}\n{\n{"step": 2}\n')
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(address)
    assert (refused.value.code, b"jsonl:2" in refused.value.read()) == (500, True)


def test_a_port_that_is_taken(make_run):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PipelineError, match=f"--port {port}: .*give another"):
            live_report([make_run()], port)


def test_ctrl_c_ends_it(make_run):
    command = [sys.executable, "-m", "pipeline", "report", str(make_run(lines=[row(1)])), "--follow"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        preexec_fn=hear_interrupts,  # noqa: PLW1509 (no thread of this process holds a lock)
        **pipes,
    ) as process:
        line = process.stdout.readline()
        assert get(line.split()[4].rstrip(";"))[0] == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")
