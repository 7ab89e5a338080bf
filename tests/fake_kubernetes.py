"""A small Kubernetes API server: EndpointSlices with list and watch, and Leases, over real HTTP. It can misbehave.

Like the real one: one resourceVersion for everything, watches begin after a version, bookmarks, 410 for versions that are
forgotten, 409 for writes to another version than the newest, 404. `frozen` makes it accept connections and say nothing; `cut`
ends all watches in the middle of a line; `mute` leaves those of that moment open and says nothing on them again; `stop` and
`start` take it away and back on the same port.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

Json = dict[str, Any]
_SLICES = re.compile(r"/apis/discovery\.k8s\.io/v1/namespaces/([^/]+)/endpointslices")
_LEASES = re.compile(r"/apis/coordination\.k8s\.io/v1/namespaces/([^/]+)/leases(?:/([^/]+))?")


def endpoint(address: str, *, serving: bool = True, terminating: bool = False) -> Json:
    """An endpoint of a slice, as the endpoint controller writes it for a Service that publishes unready addresses."""
    conditions = {"ready": True, "serving": serving, "terminating": terminating}
    return {"addresses": [address], "conditions": conditions}


class FakeKubernetes:
    """State is changed by the test's thread, served by others. Use as a context manager."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.version = 100
        self.oldest = 0  # watches that begin before it get 410
        self.slices: dict[str, Json] = {}
        self.leases: dict[str, Json] = {}
        self.log: list[tuple[int, str, Json]] = []  # (version, kind, slice)
        self.lists = self.watches = self.open = 0
        self.frozen = threading.Event()
        self.cuts = self.muted = 0
        self.bookmark_s = 0.2
        self.conflicts = 0  # writes to Leases that are refused whatever they say
        self._server: ThreadingHTTPServer | None = None
        self._port = 0

    # ---- the test's side ----

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> FakeKubernetes:
        fake = self

        class Handler(_Handler):
            kubernetes = fake

        self._server = _Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def stop(self) -> None:
        assert self._server is not None
        self.cut()
        self._server.shutdown()
        self._server.server_close()
        self._server = None
        self.cut()  # a watch that began meanwhile

    def __enter__(self) -> FakeKubernetes:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.frozen.clear()
        if self._server is not None:
            self.stop()

    def put(self, name: str, endpoints: Sequence[Json], port: int = 1, service: str = "experts") -> None:
        """Writes a slice. All endpoints of a slice have one port, as in Kubernetes; workers of tests have one slice each."""
        thing = {
            "metadata": {"name": name, "namespace": "test", "labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4",
            "endpoints": list(endpoints),
            "ports": [{"name": "metrics", "port": 9}, {"name": "grpc", "port": port}],
        }
        with self.changed:
            kind = "MODIFIED" if name in self.slices else "ADDED"
            self.slices[name] = self._stamp(thing)
            self._record(kind, thing)

    def delete(self, name: str) -> None:
        with self.changed:
            self._record("DELETED", self._stamp(self.slices.pop(name)))

    def forget(self) -> None:
        """Everything up to now is too old for a watch to begin at; those that run end."""
        with self.changed:
            self.oldest = self.version + 1
            self.version += 1
            self.cuts += 1
            self.changed.notify_all()

    def cut(self) -> None:
        """Ends all watches in the middle of a line."""
        with self.changed:
            self.cuts += 1
            self.changed.notify_all()

    def mute(self) -> None:
        """Half-open connections: the watches of this moment stay open, and nothing comes over them any more. There is one."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.open, 60)
            self.muted = self.watches

    def _stamp(self, thing: Json) -> Json:
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        return thing

    def _record(self, kind: str, thing: Json) -> None:
        self.log.append((self.version, kind, json.loads(json.dumps(thing))))
        self.changed.notify_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Callers are killed in tests: connections that break are no news."""


class _Handler(BaseHTTPRequestHandler):
    kubernetes: FakeKubernetes
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def _route(self, method: str) -> None:
        fake = self.kubernetes
        while fake.frozen.is_set():
            time.sleep(0.02)
        if fake._server is None:  # a connection that was kept open from before
            self.close_connection = True
            self.connection.close()
            return
        url = urlparse(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if _SLICES.fullmatch(url.path) and method == "GET":
            self._watch(query) if query.get("watch", "").lower() == "true" else self._list(query)
        elif found := _LEASES.fullmatch(url.path):
            self._lease(method, found[2])
        else:
            self._answer(404, {"kind": "Status", "code": 404})

    def do_GET(self) -> None:
        self._route("GET")

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._route("PUT")

    def _answer(self, status: int, body: Json) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _chosen(self, query: dict[str, str], thing: Json) -> bool:
        label, _, value = query.get("labelSelector", "").partition("=")
        return not label or thing["metadata"]["labels"].get(label) == value

    def _list(self, query: dict[str, str]) -> None:
        fake = self.kubernetes
        with fake.changed:
            fake.lists += 1
            items = [thing for thing in fake.slices.values() if self._chosen(query, thing)]
            version = str(fake.version)
        self._answer(200, {"kind": "EndpointSliceList", "metadata": {"resourceVersion": version}, "items": items})

    def _watch(self, query: dict[str, str]) -> None:
        fake, seen = self.kubernetes, int(query["resourceVersion"])
        with fake.changed:
            fake.watches += 1
            self.number = fake.watches
            cuts = fake.cuts
            gone = seen < fake.oldest
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if gone:
            self._line({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}})
            self._chunk(b"")
            return
        until = time.monotonic() + float(query.get("timeoutSeconds", "60"))
        with fake.changed:
            fake.open += 1
            fake.changed.notify_all()
        try:
            while time.monotonic() < until or self._muted():
                if (seen := self._some(query, seen, cuts)) < 0:
                    return
            self._chunk(b"")
        except OSError:
            self.close_connection = True
        finally:
            with fake.changed:
                fake.open -= 1

    def _some(self, query: dict[str, str], seen: int, cuts: int) -> int:
        """Sends what is new, or a bookmark after a while; the version up to which everything is sent. -1: the watch was cut."""
        fake = self.kubernetes
        with fake.changed:
            fake.changed.wait_for(lambda: fake.version > seen or fake.cuts > cuts, fake.bookmark_s)
        while self._muted():
            time.sleep(0.05)
        with fake.changed:
            news = [(kind, thing) for version, kind, thing in fake.log if version > seen]
            version, cut = fake.version, fake.cuts > cuts
        while fake.frozen.is_set():
            time.sleep(0.02)
        if cut:
            self._chunk(b'{"type": "MODIFIED", "obj', last=False)
            self.close_connection = True
            self.connection.close()
            return -1
        for kind, thing in news:
            if self._chosen(query, thing):
                self._line({"type": kind, "object": thing})
        if not news:
            self._line({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}})
        return version

    def _muted(self) -> bool:
        return self.number <= self.kubernetes.muted and self.kubernetes._server is not None

    def _line(self, value: Json) -> None:
        self._chunk(json.dumps(value).encode() + b"\n")

    def _chunk(self, data: bytes, last: bool = True) -> None:
        self.wfile.write(b"%x\r\n%s" % (len(data), data) + (b"\r\n" if last else b""))
        self.wfile.flush()

    def _lease(self, method: str, name: str | None) -> None:
        fake = self.kubernetes
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        with fake.changed:
            if method == "GET":
                known = fake.leases.get(name or "")
                self._answer(200, known) if known else self._answer(404, {"kind": "Status", "code": 404})
                return
            name = name or body["metadata"]["name"]
            known = fake.leases.get(name)
            newest = known["metadata"]["resourceVersion"] if known else None
            stale = method == "PUT" and body["metadata"].get("resourceVersion") != newest
            if fake.conflicts or stale or (method == "POST" and known):
                fake.conflicts = max(0, fake.conflicts - 1)
                self._answer(409, {"kind": "Status", "code": 409, "reason": "Conflict"})
                return
            fake.leases[name] = fake._stamp(body)
            self._answer(200, body)
