"""A hub on loopback: serves the files below a folder with the addresses that huggingface_hub asks for."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _file_entry(root: Path, file: Path) -> dict:
    data = file.read_bytes()
    name = str(file.relative_to(root))
    return {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name}


def _entry(root: Path, path: Path) -> dict:
    if path.is_file():
        return _file_entry(root, path)
    return {"type": "directory", "oid": "0" * 40, "size": 0, "path": str(path.relative_to(root))}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        for pattern, answer in (
            (r"/api/datasets/([^/]+/[^/]+)(?:/revision/([^/]+))?", self._info),
            (r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", self._tree),
            (r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", self._file),
        ):
            match = re.fullmatch(pattern, path)
            if match and (self.root / match[1]).is_dir() and match[2] in (None, "main", COMMIT):
                return answer(*match.groups())
        return self._reply(b"", 404)

    do_HEAD = do_GET

    def _info(self, repo, _revision):
        self._json({"_id": "1", "id": repo, "sha": COMMIT, "tags": [], "siblings": []})

    def _tree(self, repo, _revision, below):
        folder = self.root / repo / (below or "")
        if not folder.is_dir():
            return self._reply(b"{}", 404)
        return self._json([_entry(self.root / repo, path) for path in sorted(folder.iterdir())])

    def _file(self, repo, _revision, name):
        file = self.root / repo / name
        if not file.is_file():
            return self._reply(b"", 404, {"X-Error-Code": "EntryNotFound"})
        etag = _file_entry(self.root / repo, file)["oid"]
        return self._reply(file.read_bytes(), 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})

    def _json(self, value):
        self._reply(json.dumps(value).encode(), 200, {"Content-Type": "application/json"})

    def _reply(self, data, status, headers=None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def serve(root: Path) -> Iterator[str]:
    """Serve the data sets `root/<owner>/<name>/`; yields the address to use as HF_ENDPOINT."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"root": root}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
