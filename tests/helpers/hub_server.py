"""A small Hugging Face Hub on loopback: what lies there, the requests that huggingface_hub and
datasets send, the faults of a network."""

import hashlib
import json
import re
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.helpers.text_files import write_rows

URL = re.compile(
    r"(/api)?/datasets/(?P<repo>[^/]+/[^/]+)"
    r"(/(?P<what>revision|tree|resolve)/(?P<at>[^/]+)/?(?P<path>.*))?"
)
ERRORS = {
    "gated": (401, "GatedRepo"),
    "forbidden": (403, "GatedRepo"),
    "moved": (404, "RepoNotFound"),
    "revision": (404, "RevisionNotFound"),
    "entry": (404, "EntryNotFound"),
}


class HubServer(ThreadingHTTPServer):
    """Serves folder/<owner>/<name>/<files>, as write_repository() lays them out."""

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.faults, self.lock = Path(folder), {}, threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def fault(self, path: str, kind: str, times: float = float("inf"), after: int = 1_000) -> None:
        """Spoils the next `times` answers about `path`: owner/name (whatever is asked of it) or
        owner/name/file (its content).

        drop: the connection ends `after` bytes into the answer. truncate: the file is its first
        `after` bytes, and is listed so. short: so, but it is listed with its whole size. corrupt:
        16 bytes at `after` are others. gated, forbidden: 401 and 403 of a gated repository. moved:
        404. A number: that status."""
        self.faults[path] = [kind, times, after]

    def take(self, path: str) -> tuple[str, int]:
        """Kind and `after` of the fault that spoils an answer, "" where none does."""
        with self.lock:
            kind, times, after = found = self.faults.get(path) or ["", 0, 0]
            found[1] -= 1
            return (kind, after) if times > 0 else ("", 0)

    def size(self, path: str) -> int:
        """As it is listed."""
        kind, _, after = self.faults.get(path, ("", 0, 0))
        size = (self.folder / path).stat().st_size
        return min(size, after) if kind == "truncate" else size

    def server_close(self):
        self.shutdown()
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_: object):
        pass

    def do_GET(self):
        url = urlsplit(self.path)
        if not (found := URL.fullmatch(url.path)):  # huggingface_hub asks for more than data sets
            return self._error("404")
        self.repo, path = found["repo"], unquote(found["path"] or "").strip("/")
        self.root, (kind, _) = self.server.folder / self.repo, self.server.take(self.repo)
        if kind or not self.root.is_dir():
            return self._error(kind or "moved")
        sha, license = ((self.root / name).read_text() for name in (".revision", ".license"))
        if found["at"] not in (None, "main", sha):
            return self._error("revision")
        if found["what"] == "resolve":
            return self._file(path, sha)
        entries = []
        for there in sorted(self.root.rglob("[!.]*")):
            name, kind = (
                there.relative_to(self.root).as_posix(),
                ("directory" if there.is_dir() else "file"),
            )
            entries.append(
                {
                    "type": kind,
                    "path": name,
                    "oid": hashlib.sha1(name.encode()).hexdigest(),
                    "size": self.server.size(f"{self.repo}/{name}"),
                }
            )
        about = {"id": self.repo, "sha": sha, "tags": [f"license:{license}"] * bool(license)}
        if found["what"] == "tree":
            about = [entry for entry in entries if not path or entry["path"].startswith(path + "/")]
        return self._send(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

    do_HEAD = do_GET

    def _file(self, name: str, sha: str):
        if not (self.root / name).is_file():
            return self._error("entry")
        kind, after = self.server.take(f"{self.repo}/{name}") if self.command == "GET" else ("", 0)
        if kind.isdigit():
            return self._error(kind)
        data, size = (
            bytearray((self.root / name).read_bytes()),
            self.server.size(f"{self.repo}/{name}"),
        )
        size = min(size, after) if kind == "short" else size
        begin, end = re.fullmatch(
            r"bytes=(\d+)-(\d*)", self.headers.get("Range", "bytes=0-")
        ).groups()
        begin, end = int(begin), min(int(end or size), size - 1)
        if kind == "corrupt":
            data[after : after + 16] = bytes(b ^ 0xA5 for b in data[after : after + 16])
        status, part = (
            (206, {"Content-Range": f"bytes {begin}-{end}/{size}"})
            if "Range" in self.headers
            else (200, {})
        )
        etag = f'"{hashlib.sha1(f"{name}{size}".encode()).hexdigest()}"'
        return self._send(
            status, data[begin : end + 1], {"ETag": etag, "X-Repo-Commit": sha, **part}, kind, after
        )

    def _error(self, kind: str):
        status, code = ERRORS.get(kind) or (int(kind), "")
        self._send(status, b"", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, data: bytes, headers: dict, kind: str = "", after: int = 0):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": len(data)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:after] if kind == "drop" else data)
        if kind == "drop":  # a reset rather than a goodbye
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()


def write_repository(
    folder: Path, repo: str, files: dict[str, list[dict]], revision: str = "", license: str = ""
) -> None:
    """`files`: name -> rows, as write_rows() takes them. The commit is a hash by default."""
    for name, rows in files.items():
        write_rows(folder / repo / name, rows)
    revision = revision or hashlib.sha1(repo.encode()).hexdigest()
    for name, content in {".revision": revision, ".license": license, "README.md": repo}.items():
        (folder / repo / name).write_text(content)
