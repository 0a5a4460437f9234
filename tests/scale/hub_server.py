"""A server that speaks the hub's HTTP protocol, as far as models need it: repositories and their revisions,
files by name, and commits with small files inside and large ones (LFS) by their hash.

    python hub_server.py PORT LOG

Repositories are in memory. LOG gets a line for each request that changes or delivers something. While there
is a file ``refuse`` next to it, commits are refused; a file ``cut`` there ends the next delivery of weights
after 12 MB.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import sys
from pathlib import Path

LARGE = 64 * 1024  # bytes of a file from which on it is uploaded by its hash
CUT = 12_000_000  # huggingface_hub keeps what has come in pieces of 10 MB


class Hub:
    """Repositories: name to revision to file name to content."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.objects: dict[str, bytes] = {}

    def commit_id(self, name: str, revision: str) -> str:
        """A commit's hash follows from its files."""
        files = self.repositories[name][revision]
        digests = sorted((file, hashlib.sha1(content).hexdigest()) for file, content in files.items())
        return hashlib.sha1(json.dumps(digests).encode()).hexdigest()

    def files(self, name: str, revision: str) -> dict[str, bytes] | None:
        """Files of a branch or commit; None where there is none."""
        branches = self.repositories.get(name, {})
        for branch, files in branches.items():
            if revision in (branch, self.commit_id(name, branch)):
                return files
        return None


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub = Hub()
    log = Path()

    def note(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text + "\n")

    def log_message(self, *words: object) -> None:
        pass

    def answer(self, status: int, body: object = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.get("length", str(len(content))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def missing(self, code: str) -> None:
        self.answer(404, {"error": code}, X_Error_Code=code)

    # ---- reading

    def do_HEAD(self) -> None:
        self.deliver()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            name, revision = match[1], match[2] or "main"
            if name not in self.hub.repositories:
                return self.missing("RepoNotFound")
            files = self.hub.files(name, revision)
            if files is None:
                return self.missing("RevisionNotFound")
            branch = next(b for b, f in self.hub.repositories[name].items() if f is files)
            siblings = [{"rfilename": file} for file in sorted(files)]
            commit = self.hub.commit_id(name, branch)
            return self.answer(200, {"id": name, "modelId": name, "sha": commit, "siblings": siblings})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            files = self.hub.files(match[1], match[2]) or {}
            entries = [
                {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in sorted(files.items())
            ]
            return self.answer(200, entries)
        return self.deliver()

    def deliver(self) -> None:
        """A file of a revision, from a byte on where the client asks for it."""
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path.partition("?")[0])
        if match is None:
            return self.missing("EntryNotFound")
        name, revision, file = match.groups()
        files = self.hub.files(name, revision)
        if files is None:
            return self.missing("RepoNotFound" if name not in self.hub.repositories else "RevisionNotFound")
        if file not in files:
            return self.missing("EntryNotFound")
        content = files[file]
        branch = next(b for b, f in self.hub.repositories[name].items() if f is files)
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Accept_Ranges": "bytes"}
        headers["X_Repo_Commit"] = self.hub.commit_id(name, branch)
        if self.command == "HEAD":
            return self.answer(200, b"", **headers, length=str(len(content)))
        start = int(re.match(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])  # type: ignore[index]
        self.note(f"GET {file} from {start}")
        self.send_response(206 if start else 200)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        cut = self.log.with_name("cut")
        if file.endswith(".safetensors") and cut.exists():
            cut.unlink()
            self.wfile.write(content[start : start + CUT])
            self.close_connection = True
            return None
        for at in range(start, len(content), 65536):
            self.wfile.write(content[at : at + 65536])
        return None

    # ---- writing

    def do_POST(self) -> None:
        path, body = self.path.partition("?")[0], self.body()
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            known = name in self.hub.repositories
            self.hub.repositories.setdefault(name, {"main": {}})
            address = f"http://{self.headers['Host']}/{name}"
            return self.answer(409 if known else 200, {"url": address, "id": name})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/([^/]+)", path):
            self.hub.repositories[match[1]].setdefault(match[2], {})
            return self.answer(200, {})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", path):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] >= LARGE else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for file in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [self.upload_of(wanted) for wanted in json.loads(body)["objects"]]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", path):
            return self.commit(match[1], match[2], body)
        return self.missing("EntryNotFound")

    def upload_of(self, wanted: dict[str, object]) -> dict[str, object]:
        """Where an object goes; nowhere, if it is here."""
        if wanted["oid"] in self.hub.objects:
            return {"oid": wanted["oid"], "size": wanted["size"]}
        upload = {"href": f"http://{self.headers['Host']}/lfs/{wanted['oid']}", "header": {}}
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": upload}}

    def do_PUT(self) -> None:
        oid, content = self.path.rpartition("/")[2].partition("?")[0], self.body()
        if hashlib.sha256(content).hexdigest() != oid:
            return self.answer(400, {"error": "another hash"})
        self.hub.objects[oid] = content
        self.note(f"PUT {len(content)} bytes")
        return self.answer(200)

    def commit(self, name: str, revision: str, body: bytes) -> None:
        files = self.hub.repositories[name].get(revision)
        if self.log.with_name("refuse").exists():
            return self.answer(403, {"error": "not now"})
        if files is None:
            return self.missing("RevisionNotFound")
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            if line["key"] in ("file", "lfsFile"):
                self.note(f"COMMIT {value['path']}")
        commit = self.hub.commit_id(name, revision)
        address = f"http://{self.headers['Host']}/{name}/commit/{commit}"
        return self.answer(200, {"commitUrl": address, "commitOid": commit, "success": True})


if __name__ == "__main__":
    Handler.log = Path(sys.argv[2])
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
