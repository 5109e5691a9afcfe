"""Answer HTTP requests to one model, one after the other.

    GET  /           the page
    POST /generate   {"prompt": "Once", "n": 2, "tokens": 100, "temperature": 0.8, "top_k": 200, "seed": 1}, all of it optional:
                     server-sent events {"pieces": [[row, text, end], ..]}, one a token, then {"done": .., "seed": ..}.
                     A mistake gets status 400 and {"error": one sentence}. Who closes the connection ends the generation.
"""

import json
import re
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from socketserver import TCPServer
from urllib.parse import urlsplit

from eval.sample import Inference, Request, continuations
from eval.streaming import Piece
from runtime.cli import UserError, nearest

ROWS = 16                   # continuations a request, at most
BODY_BYTES = 2**20          # of a request, at most
WAITING = 8                 # requests that may wait for their turn; further ones are refused
CONNECTIONS = 64            # at a time, each a thread; further ones are closed
PATIENCE_S = 30.0           # with a client that neither sends its request nor reads what it gets
POLICY = ("default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
          "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


class Line:
    """Who generates and who waits: one at a time, in the order in which they came."""

    def __init__(self):
        self._tickets, self._changed = [], threading.Condition()

    @contextmanager
    def place(self) -> Iterator[object | None]:
        """A ticket that holds a place until the block ends; None where all are taken."""
        with self._changed:
            ticket = object() if len(self._tickets) <= WAITING else None
            self._tickets += [ticket] if ticket else []
        try:
            yield ticket
        finally:
            with self._changed:
                self._tickets = [other for other in self._tickets if other is not ticket]
                self._changed.notify_all()

    def is_first(self, ticket: object, wait_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._tickets[0] is ticket, wait_s)

    def is_empty(self, wait_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._tickets, wait_s)


class Server(ThreadingHTTPServer):
    """Takes the port at once, so that one that is taken is told before a model is loaded; then `ready` and `page` are set
    (the page's HTML, given the nonce that its script and its style must carry), then serve_forever() answers.

    Raises UserError where the port cannot be had."""
    daemon_threads = True       # a client that hangs does not keep the process
    allow_reuse_port = False    # two servers on one port would each get some of the requests
    request_queue_size = 128    # connections that may wait until they are taken; socketserver's 5 are few
    ready: Inference
    page: Callable[[str], str]

    def __init__(self, host: str, port: int):
        self.host, self.line, self.is_stopping = host, Line(), threading.Event()
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, UnicodeError) as error:    # in use, not ours, no such address, no such name
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"port {port} of host {host!r} cannot be had ({reason}): give another port= or host=") from error

    def server_bind(self):
        TCPServer.server_bind(self)     # HTTPServer's asks the network for the machine's full name, which may take long

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.server_address[1]}/"

    def is_ours(self, host: str | None) -> bool:
        """Whether a browser can have meant this server by the Host header: an address, or a name that is this machine's.

        A stranger's page may point a name of its own at this machine, and its browser then takes the two for one site."""
        own, name = socket.gethostname().lower(), ""
        try:
            name = urlsplit(f"//{host or ''}").hostname or ""
            return bool(ip_address(name))
        except ValueError:
            return name in {"localhost", self.host.lower(), own, own.partition(".")[0]} - {""}

    def process_request(self, request, client_address):
        if not self._free.acquire(blocking=False):
            return self.shutdown_request(request)
        try:
            return super().process_request(request, client_address)
        except RuntimeError:    # no further thread is to be had
            self._free.release()
            raise

    def process_request_thread(self, request, client_address):
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):    # who is gone is no error
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection, one request."""
    server_version, sys_version = "nanoFP8", ""
    timeout = PATIENCE_S

    def do_GET(self):
        if not self.server.is_ours(self.headers["Host"]):
            return self._refuse(403, f"this server is not called {self.headers['Host']!r}: open {self.server.url}")
        if self.path.partition("?")[0] != "/":
            return self._refuse(404, "there is only one page here: /")
        nonce = secrets.token_urlsafe(16)
        content = self.server.page(nonce).encode()
        return self._send(200, "text/html; charset=utf-8", content, ("Content-Security-Policy", POLICY.format(nonce=nonce)))

    def do_POST(self):
        host, origin = self.headers["Host"], self.headers["Origin"]
        if not self.server.is_ours(host) or origin and origin.partition("://")[2] != host:
            return self._refuse(403, "another site's page may not ask this server")
        if self.path != "/generate":
            return self._refuse(404, "what can be asked is POST /generate")
        try:
            request = self._read_request()
            steps = continuations(self.server.ready, request)
        except UserError as error:
            return self._refuse(400, str(error))
        with self.server.line.place() as ticket:
            if ticket is None:
                return self._refuse(503, f"{WAITING} requests are waiting already: try again in a moment", ("Retry-After", "5"))
            return self._answer(steps, ticket, request.seed)

    def _read_request(self) -> Request:
        length = self.headers["Content-Length"] or ""
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > BODY_BYTES:
            raise UserError(f"Content-Length={length!r} must be the bytes of the request's body, at most {BODY_BYTES}")
        try:
            asked = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise UserError(f"the request is no JSON ({error})") from error
        names = [field.name for field in fields(Request)]
        if not isinstance(asked, dict):
            raise UserError(f"the request must be a JSON object with any of {', '.join(names)}")
        for name in asked:
            if name not in names:
                raise UserError(f"there is no {name[:40]!r} to ask for{nearest(name[:40], names)}")
        request = Request(**{"seed": secrets.randbelow(2**31)} | asked)
        if request.n > ROWS:
            raise UserError(f"n={request.n} must be between 1 and {ROWS} here")
        return request

    def _answer(self, steps: Iterator[list[Piece]], ticket: object, seed: int) -> None:
        """Send the pieces when it is this ticket's turn, until they end, the client is gone or the server stops."""
        try:
            self._send(200, "text/event-stream; charset=utf-8", None)
            while not self.server.line.is_first(ticket, 0.2):
                if self._is_over():
                    return
            begin, n = time.perf_counter(), 0
            with closing(steps):
                for pieces in steps:
                    if self._is_over():
                        return
                    n += sum(piece.end != "limit" for piece in pieces)      # those come after the last token
                    self._tell({"pieces": pieces})
            self._tell({"done": f"{n} tokens in {time.perf_counter() - begin:.1f} s", "seed": seed})
        except (ConnectionError, TimeoutError):     # gone while it was written to
            return
        except Exception as error:      # the server goes on for the others
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            print(reason, file=sys.stderr, flush=True)
            self._tell({"error": f"the model stopped ({reason})"})

    def _is_over(self) -> bool:
        """Whether nobody waits for more: the server stops, or the client has closed its side."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            closed = bool(selector.select(0)) and self.connection.recv(1, socket.MSG_PEEK) == b""
        return closed or self.server.is_stopping.is_set()

    def _tell(self, event: dict) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def _refuse(self, status: int, sentence: str, *headers: tuple[str, str]) -> None:
        self._send(status, "application/json", json.dumps({"error": sentence}).encode() + b"\n", *headers)

    def _send(self, status: int, kind: str, content: bytes | None, *headers: tuple[str, str]) -> None:
        """Status and headers, then `content`; None where it is sent as it comes, up to the connection's end."""
        self.send_response(status)
        length = [("Content-Length", str(len(content)))] if content is not None else []
        for name, value in (("Content-Type", kind), *length, ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"),
                            ("Referrer-Policy", "no-referrer"), *headers):
            self.send_header(name, value)
        self.end_headers()
        if content is not None:
            self.wfile.write(content)

    def log_message(self, *args) -> None:
        """What people ask stays with them."""
