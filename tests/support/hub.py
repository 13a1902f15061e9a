"""A stand-in of the hub's API for uploads, on this machine: it records what huggingface_hub sends."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_standinstandinstandin"
COMMIT = "0" * 40


@dataclass
class StandIn:
    """requests: method and path of each request with its JSON. files: uploaded contents by path, of all
    commits. refuse: by a part of a path, the status that is answered.
    """

    url: str = ""
    requests: list[tuple[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    refuse: dict[str, int] = field(default_factory=dict)

    def answer(self, method: str, path: str, token: str, body: Any) -> tuple[int, dict[str, Any]]:
        path = path.split("?")[0]
        self.requests.append((f"{method} {path}", body))
        for part, status in self.refuse.items():
            if part in path:
                return status, {"error": "refused by the stand-in"}
        if token != f"Bearer {TOKEN}" and path != "/":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/repos/create":
            return 200, {"url": f"{self.url}/{body['organization']}/{body['name']}"}
        if "/preupload/" in path:
            sent = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in body["files"]
            ]
            return 200, {"files": sent}
        if "/commit/" in path:
            for line in body:
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.url}/{'/'.join(path.split('/')[3:5])}/commit/{COMMIT}"
            return 200, {"commitUrl": url, "commitOid": COMMIT, "pullRequestUrl": None}
        if path == "/" or path == "/api/validate-yaml" or "/branch/" in path:
            return 200, {"warnings": [], "errors": []}
        return 404, {"error": f"the stand-in does not know {path}"}

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]


@contextmanager
def hub_stand_in() -> Iterator[StandIn]:
    """Serve a stand-in until the block ends."""
    state = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            lines = "ndjson" in (self.headers.get("Content-Type") or "")
            body = [json.loads(line) for line in text.splitlines()] if lines else json.loads(text or "{}")
            token = self.headers.get("Authorization") or ""
            status, found = state.answer(self.command, self.path, token, body)
            answer = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)

        do_GET = do_POST = do_HEAD = handle_any

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
