"""A small Hugging Face Hub on loopback: what lies there, the requests that huggingface_hub and datasets send, the faults of a
network."""

import hashlib
import json
import random
import re
import socket
import struct
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow
import pyarrow.parquet

from configs.sources import SOURCES
from tests.text_files import PACK

REPO = r"(?P<repo>[^/]+/[^/]+)"
API = re.compile(rf"/api/datasets/{REPO}(/revision/(?P<at>[^/]+)|/(?P<what>tree|paths-info)/(?P<revision>[^/]+)/?(?P<path>.*))?")
RESOLVE = re.compile(rf"(?P<cdn>/cdn)?/datasets/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
PAGE = 3        # entries of a listing in one answer; the Hub's pages hold 1,000
WORDS = ["the", "of", "energy", "matrix", "naïve", "Größe", "東京", "данные", "theorem", "🙂", "function", "return", "print"]
COPIES = 7      # every so many documents are copies of earlier ones


@dataclass
class Fault:
    kind: str
    times: int | None       # answers that it spoils; None: all
    after: int              # bytes of an answer that still go out; "truncate": of the file


class HubServer:
    """Serves folder/<owner>/<name>/<files>; a repository's commit is the content of its .revision, else a hash of its name."""

    def __init__(self, folder: Path):
        self.folder, self._faults, self._lock = Path(folder), {}, threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def fault(self, path: str, kind: str, times: int | None = None, after: int = 1_000) -> None:
        """Spoils the next `times` answers about `path`: owner/name (whatever is asked of it) or owner/name/file (its content).

        drop: the connection ends `after` bytes into the answer. truncate: the file is its first `after` bytes, and is listed so.
        short: so, but it is listed with its whole size. corrupt: 16 bytes at `after` are others. gated, forbidden: 401 and 403 of
        a gated repository. moved: 404. A number: that status."""
        with self._lock:
            self._faults[path] = Fault(kind, times, after)

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()

    def take(self, path: str) -> Fault | None:
        with self._lock:
            fault = self._faults.get(path)
            if fault is None or fault.times == 0:
                return None
            if fault.times is not None:
                fault.times -= 1
            return fault

    def size(self, path: str) -> int:
        """As it is listed."""
        fault, size = self._faults.get(path), (self.folder / path).stat().st_size
        return min(size, fault.after) if fault and fault.kind == "truncate" else size

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


def point_at(url: str, monkeypatch) -> None:
    """What HF_ENDPOINT does, after the packages were imported."""
    import datasets
    from huggingface_hub import constants
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def commit(folder: Path, repo: str) -> str:
    pinned = folder / repo / ".revision"
    return pinned.read_text().strip() if pinned.exists() else hashlib.sha1(repo.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.query, found = parse_qs(url.query), API.fullmatch(url.path) or RESOLVE.fullmatch(url.path)
        if not found:
            return self._error(404, "NotFound")
        parts = {key: value and unquote(value) for key, value in found.groupdict().items()}     # refs%2Fconvert%2Fparquet
        self.repo, self.root = parts["repo"], self.hub.folder / parts["repo"]
        if self._spoiled(self.hub.take(self.repo)):
            return None
        if not self.root.is_dir():
            return self._error(401 if "authorization" not in self.headers else 404, "RepoNotFound")
        self.sha = commit(self.hub.folder, self.repo)
        if (parts.get("revision") or parts.get("at") or "main") not in ("main", self.sha):
            return self._error(404, "RevisionNotFound")
        if found.re is RESOLVE:
            if not parts["cdn"] and parts["path"].endswith((".gz", ".zst", ".parquet")):    # large files lie elsewhere
                return self._send(302, b"", {"Location": f"{self.hub.url}/cdn{self.path}", "X-Repo-Commit": self.sha})
            return self._file(parts["path"])
        return {"tree": self._tree, "paths-info": self._paths_info, None: self._info}[parts["what"]](parts["path"])

    do_HEAD = do_POST = do_GET

    def _info(self, _):
        readme = self.root / "README.md"
        license = re.search(r"^license: (.+)$", readme.read_text(), re.M) if readme.exists() else None
        self._json({"_id": "0", "id": self.repo, "author": self.repo.split("/")[0], "sha": self.sha, "private": False,
                    "gated": False, "disabled": False, "lastModified": "2026-01-01T00:00:00.000Z", "downloads": 0, "likes": 0,
                    "tags": [f"license:{license[1]}"] if license else [], "cardData": {},
                    "siblings": [{"rfilename": entry["path"]} for entry in self._entries() if entry["type"] == "file"]})

    def _entries(self) -> list[dict]:
        entries = []
        for path in sorted(self.root.rglob("*")):
            name, is_folder = path.relative_to(self.root).as_posix(), path.is_dir()
            oid = hashlib.sha1(f"{self.repo}/{name}".encode()).hexdigest()
            if path.name != ".revision":
                entries.append({"type": "directory" if is_folder else "file", "path": name, "oid": oid,
                                "size": 0 if is_folder else self.hub.size(f"{self.repo}/{name}")})
        return entries

    def _tree(self, under: str):
        under, is_deep = under.strip("/"), self.query.get("recursive", ["false"])[0].lower()
        within = [e for e in self._entries() if not under or e["path"].startswith(under + "/")]
        if under and not within:
            return self._error(404, "EntryNotFound")
        if is_deep != "true":
            within = [e for e in within if "/" not in e["path"][len(under):].strip("/")]
        start, headers = int(self.query.get("cursor", ["0"])[0]), {}
        if start + PAGE < len(within):
            more = f"{self.hub.url}{urlsplit(self.path).path}?recursive={is_deep}&cursor={start + PAGE}"
            headers["Link"] = f'<{more}>; rel="next"'
        return self._json(within[start:start + PAGE], headers)

    def _paths_info(self, _):
        wanted = parse_qs(self.body.decode()).get("paths") or (json.loads(self.body)["paths"] if self.body[:1] == b"{" else [])
        self._json([e for e in self._entries() if e["path"] in {path.strip("/") for path in wanted}])

    def _file(self, name: str):
        path = self.root / name
        if not path.is_file() or path.name == ".revision":
            return self._error(404, "EntryNotFound")
        fault = self.hub.take(f"{self.repo}/{name}") if self.command == "GET" else None
        if self._spoiled(fault):
            return None
        kind, size = fault.kind if fault else "", self.hub.size(f"{self.repo}/{name}")
        size = min(size, fault.after) if kind == "short" else size
        headers = {"ETag": f'"{hashlib.sha1(f"{path}{size}".encode()).hexdigest()}"', "X-Repo-Commit": self.sha,
                   "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        begin, end, status, asked = 0, size - 1, 200, re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            begin, end, status = int(asked[1]), min(int(asked[2] or end), end), 206
            if begin >= size:
                return self._send(416, b"", {"Content-Range": f"bytes */{size}"})
            headers["Content-Range"] = f"bytes {begin}-{end}/{size}"
        data = bytearray(path.read_bytes())
        if kind == "corrupt":
            data[fault.after:fault.after + 16] = bytes(b ^ 0xa5 for b in data[fault.after:fault.after + 16])
        return self._send(status, bytes(data[begin:end + 1]), headers, drop=fault.after if kind == "drop" else None)

    # ---------------------------------------------------------------------------------------------------------- answers

    def _spoiled(self, fault: Fault | None) -> bool:
        """Whether the answer was an error that the fault wants."""
        kind = fault.kind if fault else ""
        errors = {"gated": (401, "GatedRepo"), "forbidden": (403, "GatedRepo"), "moved": (404, "RepoNotFound")}
        if kind not in errors and not kind.isdigit():
            return False
        self._error(*errors.get(kind) or (int(kind), ""))
        return True

    def _error(self, status: int, code: str):
        self._send(status, json.dumps({"error": code or "try again"}).encode(),
                   {"Content-Type": "application/json", **({"X-Error-Code": code, "X-Error-Message": code} if code else {})})

    def _json(self, value, headers: dict | None = None):
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, data: bytes, headers: dict, drop: int | None = None):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": len(data)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            self.wfile.write(data[:drop])
            if drop is not None and drop < len(data):
                self.wfile.flush()
                # A reset rather than a goodbye.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()
        except OSError:
            self.close_connection = True        # the reader went away


# -------------------------------------------------------------------------------------------------------- repositories

def make_hub(folder: Path, documents: int = 60) -> dict[str, dict[str, list[dict]]]:
    """Writes the repositories of configs/sources.py as they lie on the Hub, `documents` rows a file, and returns what lies in
    them: repository -> file -> rows. There are copies within and across the sources, empty documents, odd Unicode."""
    rng, hub, said = random.Random(3), {}, []

    def text() -> str:
        if said and rng.random() < 1 / COPIES:
            return rng.choice(said)
        kind = rng.random()
        new = " ".join(rng.choices(WORDS, k=rng.randint(5, 300))) if kind > 0.03 else ("" if kind < 0.01 else " \n\t")
        said.append(new + rng.choice(["", "\n", "\r\n", "<|endoftext|>", "\0", "\u2028", "\x85 end"]) if new.strip() else new)
        return said[-1]

    def code(language: str, number: int) -> dict:
        content = text() + ("\ud83d cut in half" if number % 20 == 7 else "")     # JSON can say half a character; parquet cannot
        return {"id": f"{language}{number}", "text": content, "score": 3.2, "created": None,
                "metadata": {"language": language, "license": "MIT", "gha_language": rng.choice(["C", "Python", None])}}

    web, stack, arxiv = (SOURCES[name].dataset for name in ("fineweb_edu", "python", "arxiv"))
    hub[web] = {f"sample/100BT/{name}.parquet": [
        {"text": text(), "id": f"<urn:{name}:{n}>", "dump": "CC-MAIN-2013-20", "score": 3.1} for n in range(documents)]
        for name in ("000_00000", "000_00001", "001_00000", "001_00001")}
    hub[web]["sample/10BT/000_00000.parquet"] = [{"text": "of another sample", "id": "x"}]
    # As there: grouped by language, and a language may begin in mid-file.
    runs = [("Markdown", 1), ("C", 1.5), ("HTML", 0.5), ("Python", 1.5), ("TypeScript", 0.5), ("Zig", 1)]
    rows = [code(language, n) for language, files in runs for n in range(int(files * documents))]
    hub[stack] = {f"stack-edu-{i:04d}.json.gz": rows[i * documents:(i + 1) * documents] for i in range(len(rows) // documents)}
    hub[arxiv] = {f"arxiv-papers-{i:04d}.json.gz": [
        {"id": f"{i}.{n}", "text": text(), "metadata": {"license": "CC-BY"}} for n in range(documents // 2)] for i in range(3)}
    for repo, files in hub.items():
        write_repository(folder, repo, files)
        revision = next(source.revision for source in SOURCES.values() if source.dataset == repo)
        (folder / repo / ".revision").write_text(revision)
    return hub


def write_repository(folder: Path, repo: str, files: dict[str, list[dict]], license: str | None = None) -> None:
    """Writes rows as the names say: .parquet, .jsonl, .json, each line-based one also packed."""
    for name, rows in files.items():
        path = folder / repo / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=20)
            continue
        path.write_bytes(PACK.get(path.suffix, bytes)("".join(json.dumps(row) + "\n" for row in rows).encode()))
    (folder / repo / "README.md").write_text((f"---\nlicense: {license}\n---\n" if license else "") + f"# {repo}\n")
