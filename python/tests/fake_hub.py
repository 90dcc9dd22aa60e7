# SPDX-License-Identifier: Apache-2.0
"""A server on this machine that answers for the Hugging Face hub, with one model of a folder."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

_COMMIT = "0123456789" * 4


def _handler(name: str, folder: Path) -> type[BaseHTTPRequestHandler]:
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            path, file = self.path.partition("?")[0], self.path.rpartition("/")[2]
            found: object = None
            if path == f"/api/models/{name}/revision/main":
                found = {"id": name, "sha": _COMMIT, "siblings": [{"rfilename": one} for one in files]}
            elif path == f"/api/models/{name}/tree/{_COMMIT}":
                found = [{"type": "file", "path": one, "size": len(files[one]), "oid": one} for one in files]
            body = files.get(file) if path.startswith(f"/{name}/resolve/") else json.dumps(found).encode()
            exists = found is not None or (body is not None and path.startswith(f"/{name}/resolve/"))
            self.send_response(200 if exists else 404)
            if not exists:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("X-Repo-Commit", _COMMIT)
            self.send_header("ETag", f'"{file}"')
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body) if exists and body else 0))
            self.end_headers()
            if exists and body and self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD = _answer

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def fake_hub(name: str, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets huggingface_hub find the files of a folder under a model's name, and keep them in a cache of its own."""
    constants = huggingface_hub.constants
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(name, folder)) as server, monkeypatch.context() as patch:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        here = f"http://127.0.0.1:{server.server_port}"
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, here)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", here)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
