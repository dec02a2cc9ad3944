"""A hub on loopback: serves the files below a folder with the addresses that huggingface_hub asks for."""

import hashlib
import json
import re
import threading
from collections.abc import Iterable, Iterator
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


def _etag(file: Path) -> str:
    """Large files are known by their SHA-256, others by git's hash."""
    return (hashlib.sha256 if file.suffix == ".safetensors" else hashlib.sha1)(file.read_bytes()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path
    cut_once: list[str]
    resumed: list[str]

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        for pattern, answer in (
            (r"/api/datasets/([^/]+/[^/]+)(?:/revision/([^/]+))?", self._info),
            (r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", self._tree),
            (r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", self._file),
            (r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", self._info),
            (r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", self._tree),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", self._file),
        ):
            match = re.fullmatch(pattern, path)
            if match and (self.root / match[1]).is_dir() and match[2] in (None, "main", COMMIT):
                return answer(*match.groups())
        return self._reply(b"", 404)

    do_HEAD = do_GET

    def _info(self, repo, _revision):
        names = sorted(path.name for path in (self.root / repo).iterdir() if path.is_file())
        siblings = [{"rfilename": name} for name in names]
        self._json({"_id": "1", "id": repo, "sha": COMMIT, "tags": [], "siblings": siblings})

    def _tree(self, repo, _revision, below):
        folder = self.root / repo / (below or "")
        if not folder.is_dir():
            return self._reply(b"{}", 404)
        return self._json([_entry(self.root / repo, path) for path in sorted(folder.iterdir())])

    def _file(self, repo, _revision, name):
        file = self.root / repo / name
        if not file.is_file():
            return self._reply(b"", 404, {"X-Error-Code": "EntryNotFound"})
        data = file.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(file)}"', "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and int(wanted[1]):
            self.resumed.append(name)
            rest = {"Content-Range": f"bytes {wanted[1]}-{len(data) - 1}/{len(data)}"}
            return self._reply(data[int(wanted[1]) :], 206, headers | rest)
        if self.command == "GET" and name in self.cut_once:
            self.cut_once.remove(name)
            return self._reply(data, 200, headers, sent=len(data) // 2)
        return self._reply(data, 200, headers)

    def _json(self, value):
        self._reply(json.dumps(value).encode(), 200, {"Content-Type": "application/json"})

    def _reply(self, data, status, headers=None, sent=None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:sent])
        if sent is not None:
            self.close_connection = True

    def log_message(self, *_):
        pass


@contextmanager
def serve(root: Path, cut_once: Iterable[str] = (), resumed: list[str] | None = None) -> Iterator[str]:
    """Serve the repositories `root/<owner>/<name>/`; yields the address to use as HF_ENDPOINT.

    The first reply with a file of `cut_once` breaks off half-way; files asked for from the middle on land in `resumed`.
    """
    facts = {"root": root, "cut_once": list(cut_once), "resumed": [] if resumed is None else resumed}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), facts))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
