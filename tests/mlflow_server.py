"""A stand-in for MLflow's server, because `mlflow-skinny` contains only the client."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any

_INFO = {"run_id": "r1", "run_uuid": "r1", "experiment_id": "1", "status": "RUNNING", "start_time": 1}
_ANSWER = {"experiment": {"experiment_id": "1", "name": "app"}, "run": {"info": _INFO, "data": {}}}


class MLflowServer:
    """A server with a single run.

    Attributes
    ----------
    asked
        Last part of the path of each request.
    credentials
        Authorization header of each request, or None.
    metrics
        Name and step of each metric that was accepted.
    tags
        Values of the tags that were set, by name.
    is_down
        While True, each request is answered with an error.
    refused
        Names of metrics that are refused.
    failures
        Number of requests that were answered with an error.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.credentials: list[str | None] = []
        self.metrics: list[tuple[str, int]] = []
        self.tags: dict[str, str] = {}
        self.is_down = False
        self.refused: set[str] = set()
        self.failures = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.credentials.append(self.headers.get("Authorization"))
                status = outer._take(self.path, json.loads(body) if body else {})
                outer.failures += status != 200
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                error = {"error_code": "INVALID_PARAMETER_VALUE", "message": "no such name"}
                self.wfile.write(json.dumps(_ANSWER if status == 200 else error).encode())

            do_POST = do_GET  # noqa: N815 - http.server requires this name

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port

    def __enter__(self) -> MLflowServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, path: str, body: dict[str, Any]) -> int:
        name = path.partition("?")[0].rpartition("/")[2]
        self.asked.append(name)
        if self.is_down:
            return 503
        metrics = [(metric["key"], int(metric["step"])) for metric in body.get("metrics", ())]
        if not self.refused.isdisjoint(key for key, _ in metrics):
            return 400
        self.metrics += metrics
        if name == "set-tag":
            self.tags[body["key"]] = body["value"]
        return 200
