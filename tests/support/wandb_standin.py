#!/usr/bin/env python3
"""Stands in for the W&B backend on the loopback device: a real wandb 0.31 client can run and resume with it.

    python wandb_standin.py PORT DIR
    WANDB_BASE_URL=http://127.0.0.1:PORT WANDB_API_KEY=<40 characters> python your_run.py

DIR receives history-<run>.jsonl (rows as W&B would store them), runs.json (config, summary, exit code),
artifacts.json (versions of artifacts, with their aliases), files/ (uploads) and requests.jsonl. The last has
every request; a gap in the stream is marked GAP, an unknown path UNKNOWN, and a wrong key REFUSED.
"""

import base64
import contextlib
import gzip
import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WRONG_KEY = b"api:" + b"wrong" * 8


class Store:
    """Stores the backend's data on disk, so that the stand-in can be stopped and started again."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()
        self.runs_file = folder / "runs.json"
        self.runs = json.loads(self.runs_file.read_text()) if self.runs_file.exists() else {}

    def save(self) -> None:
        """Write runs.json."""
        partial = self.runs_file.with_suffix(".tmp")
        partial.write_text(json.dumps(self.runs, indent=1))
        partial.replace(self.runs_file)

    def history(self, run: str) -> list[str]:
        """Return the stored rows of a run, as lines of JSON."""
        path = self.folder / f"history-{run}.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def append_history(self, run: str, offset: int, lines: list[str]) -> tuple[int, int] | None:
        """Append the new rows.

        Returns:
            (number of stored rows, offset of the request) if rows between them are missing; otherwise `None`.
        """
        num_stored = len(self.history(run))
        with (self.folder / f"history-{run}.jsonl").open("a") as file:
            file.writelines(line + "\n" for i, line in enumerate(lines) if offset + i >= num_stored)
        return (num_stored, offset) if offset > num_stored else None

    def note(self, record: dict) -> None:
        """Append a request to requests.jsonl."""
        with (self.folder / "requests.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def project(run: dict) -> dict:
    """Return a run's project as GraphQL names it."""
    return {
        "id": "UHJvamVjdDox",
        "name": run["project"],
        "entity": {"id": "RW50aXR5OjE=", "name": run["entity"]},
    }


def bucket_of(store: Store, name: str) -> dict:
    """Return a run in the form that the client requests at its start."""
    run = store.runs[name]
    rows = store.history(name)
    return {
        "id": base64.b64encode(f"Run:{name}".encode()).decode(),
        "name": name,
        "displayName": run["displayName"],
        "description": "",
        "config": run.get("config") or "{}",
        "sweepName": None,
        "project": project(run),
        "tags": [],
        "wandbConfig": json.dumps({"t": {}}),  # without "t" the client concludes that the run never started
        "summaryMetrics": run.get("summary") or "{}",
        "logLineCount": 0,
        "historyLineCount": len(rows),
        "historyTail": json.dumps(rows[-1:]),
        "eventsLineCount": run.get("events", 0),
        "eventsTail": "[]",
    }


def upsert_run(store: Store, variables: dict) -> dict:
    """Create or update a run."""
    name = variables.get("name") or base64.b64decode(variables["id"]).decode().split(":")[1]
    inserted = name not in store.runs
    given = {
        "project": variables.get("project") or "uncategorized",
        "entity": variables.get("entity") or "local",
    }
    run = store.runs.setdefault(name, given | {"displayName": name})
    run.update({key: value for key, value in variables.items() if value is not None})
    store.save()
    return {"upsertBucket": {"bucket": bucket_of(store, name), "inserted": inserted}}


def resume_status(store: Store, variables: dict) -> dict:
    """Answer the question whether a run exists."""
    run = store.runs.get(variables.get("name"))
    if run is None:
        return {
            "model": {**project({"project": variables.get("project"), "entity": "local"}), "bucket": None}
        }
    return {"model": {**project(run), "bucket": bucket_of(store, variables["name"])}}


def answer_agent(store: Store, operation: str, variables: dict) -> dict:
    """Answer the agent of a sweep.

    The file sweep.json has the sweep's `config` as text, and `trials`, a list of values. The agent gets one
    trial at a time, and the command to exit after the last.
    """
    path = store.folder / "sweep.json"
    sweep = json.loads(path.read_text())
    if operation == "SweepWithRuns":
        return {
            "project": {"sweep": {"id": "x", "name": "s", "config": sweep["config"], "runs": {"edges": []}}}
        }
    if operation == "CreateAgent":
        return {"createAgent": {"agent": {"id": "QWdlbnQ6MQ=="}}}
    commands = [{"type": "exit"}]
    if any(json.loads(variables["runState"]).values()):
        commands = []  # a trial still runs
    elif sweep["trials"]:
        values = sweep["trials"].pop(0)
        commands = [
            {"type": "run", "run_id": f"trial{len(sweep['trials'])}", "program": "none", "args": values}
        ]
        path.write_text(json.dumps(sweep))
    return {"agentHeartbeat": {"agent": {"id": "QWdlbnQ6MQ=="}, "commands": json.dumps(commands)}}


def answer_artifact(store: Store, operation: str, variables: dict, host: str) -> dict:
    """Answer a request about artifacts.

    An artifact with the name and digest of a stored one is the same version. An alias belongs to one version.
    """
    path = store.folder / "artifacts.json"
    versions = json.loads(path.read_text()) if path.exists() else []
    if operation == "ArtifactType":
        return {"project": {"artifact": None}}
    if operation == "CreateArtifact":
        given = variables["input"]
        name = given["artifactCollectionName"]
        digest = given["digest"]
        aliases = [each["alias"] for each in given["aliases"]]
        for version in versions:
            if version["name"] == name:
                version["aliases"] = [alias for alias in version["aliases"] if alias not in aliases]
        same = [version for version in versions if (version["name"], version["digest"]) == (name, digest)]
        version = same[0] if same else {"name": name, "digest": digest, "aliases": [], "state": "PENDING"}
        version |= {"type": given["artifactTypeName"], "metadata": json.loads(given["metadata"] or "{}")}
        version["aliases"] += aliases
        versions += [] if same else [version]
        artifact_id = str(versions.index(version))
        artifact = {"id": artifact_id, "state": version["state"], "artifactSequence": {"id": "x"}}
        answer = {"createArtifact": {"artifact": artifact}}
    elif operation == "CreateArtifactManifest":
        url = f"http://{host}/upload/artifacts/{variables['artifactID']}/{variables['name']}"
        file = {"id": "x", "name": variables["name"], "displayName": variables["name"]}
        file |= {"uploadUrl": url, "uploadHeaders": []}
        answer = {
            "createArtifactManifest": {"artifactManifest": {"id": variables["artifactID"], "file": file}}
        }
    else:
        versions[int(variables["artifactID"])]["state"] = "COMMITTED"
        answer = {"commitArtifact": {"artifact": {"id": variables["artifactID"], "digest": "x"}}}
    path.write_text(json.dumps(versions, indent=1))
    return answer


def answer_graphql(store: Store, operation: str, query: str, variables: dict, host: str) -> dict:
    """Answer a GraphQL request by its operation or its text."""
    if operation == "Viewer" or "viewer" in query:
        return {
            "viewer": {
                "id": "VXNlcjox",
                "entity": "local",
                "username": "local",
                "flags": "{}",
                "email": "l@localhost",
                "name": "local",
                "teams": {"edges": []},
            }
        }
    if "serverInfo" in query:
        return {
            "serverInfo": {
                "features": [],
                "latestLocalVersionInfo": None,
                "cliVersionInfo": {"max_cli_version": "0.99.0", "min_cli_version": "0.1.0"},
            }
        }
    if "upsertBucket" in query:
        return upsert_run(store, variables)
    if "RunResumeStatus" in query:
        return resume_status(store, variables)
    if operation == "CreateRunFiles":
        urls = [
            {"name": f, "uploadUrl": f"http://{host}/upload/{variables.get('run')}/{f}"}
            for f in variables.get("files", [])
        ]
        return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": urls}}
    if operation == "MarkRunFilesUploaded":
        return {"markRunFilesUploaded": {"success": True}}
    if operation in ("ArtifactType", "CreateArtifact", "CreateArtifactManifest", "CommitArtifact"):
        return answer_artifact(store, operation, variables, host)
    if operation in ("SweepWithRuns", "CreateAgent", "Heartbeat"):
        return answer_agent(store, operation, variables)
    if "Alert" in operation:
        store.runs[variables["runName"]].setdefault("alerts", []).append(
            [variables["title"], variables["text"], variables["severity"]]
        )
        store.save()
        return {"notifyScriptableRunAlert": {"success": True}}
    if "RunStoppedStatus" in query or operation == "RunState":
        return {"project": {"run": {"stopped": False, "state": "running"}}}
    if operation == "OrganizationCoreWeaveOrganizationID":
        return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}
    return {}


def take_stream(store: Store, run: str, message: dict, record: dict) -> dict:
    """Store the rows, summary and exit code that a client streams."""
    entry = store.runs.setdefault(run, {"project": "uncategorized", "entity": "local", "displayName": run})
    for name, part in (message.get("files") or {}).items():
        if name == "wandb-history.jsonl":
            gap = store.append_history(run, part["offset"], part["content"])
            if gap:
                record["GAP"] = gap
        elif name == "wandb-summary.json":
            entry["summary"] = part["content"][-1]
        elif name == "wandb-events.jsonl":
            entry["events"] = part["offset"] + len(part["content"])
    if message.get("complete"):
        entry["exitcode"] = message.get("exitcode")
    store.save()
    return {"exitcode": None, "limits": {}}


def make_handler(store: Store) -> type[BaseHTTPRequestHandler]:
    """Return a request handler that reads and writes the store."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args) -> None:
            pass

        def read_body(self) -> bytes:
            body = b""
            if self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline().strip() or b"0", 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # a client that ended without closing
                super().handle()

        def handle_call(self) -> None:
            body = self.read_body()
            record = {"time": time.time(), "method": self.command, "path": self.path, "bytes": len(body)}
            status = 200
            answer = {}
            with store.lock:
                if base64.b64encode(WRONG_KEY).decode() in self.headers.get("Authorization", ""):
                    record["REFUSED"] = True
                    status = 401
                    answer = {"error": "no such key"}
                elif self.path == "/graphql":
                    call = json.loads(body)
                    named = re.search(r"(?:query|mutation) (\w+)", call["query"])
                    operation = call.get("operationName") or (named.group(1) if named else "")
                    record["operation"] = operation
                    data = answer_graphql(
                        store, operation, call["query"], call.get("variables") or {}, self.headers["Host"]
                    )
                    answer = {"data": data}
                elif self.path.endswith("/file_stream"):
                    answer = take_stream(store, self.path.split("/")[4], json.loads(body), record)
                elif self.path.startswith("/upload/"):
                    target = store.folder / "files" / self.path.removeprefix("/upload/").replace("..", "_")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(body)
                else:
                    record["UNKNOWN"] = True
                    status = 404
                    answer = {"error": "not in the stand-in"}
                store.note(record)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = handle_call

    return Handler


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    ThreadingHTTPServer(
        ("127.0.0.1", int(sys.argv[1])), make_handler(Store(Path(sys.argv[2])))
    ).serve_forever()
