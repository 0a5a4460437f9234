"""Stands for the program ``vllm``: serves OpenAI's API on a unix socket, with the standard library alone.

    vllm serve MODEL [options] --uds SOCKET

What it is asked, headers and body, is a line of JSON in $FAKE_VLLM_LOG; the first line has its own options.
Prompts that mean something: "die" ends the process, "wait" answers when the client has left, "long" is a
stream of half a minute.
"""

import json
import os
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

WORDS = ("one ", "two ", "three")
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def note(**record):
    with Path(os.environ["FAKE_VLLM_LOG"]).open("a") as log:
        log.write(json.dumps(record) + "\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def address_string(self):
        return "socket"

    def log_message(self, *words):
        pass

    def do_GET(self):
        bodies = {"/v1/models": {"data": [{"id": "fake"}]}, "/health": {}, "/metrics": {"vllm": 1}}
        self.answer(200 if self.path in bodies else 404, bodies.get(self.path, {"error": {"message": "no"}}))

    def do_POST(self):
        raw = self.rfile.read(int(self.headers["content-length"]))
        body = json.loads(raw)
        note(path=self.path, headers=dict(self.headers), body=body)
        if body.get("prompt") == "die":
            os._exit(3)
        if body.get("prompt") == "wait":
            self.wait()
        elif body.get("stream"):
            self.stream(body)
        else:
            self.answer(200, {"choices": [{"text": "".join(WORDS)}], "usage": USAGE})

    def stream(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for word in WORDS * (500 if body["prompt"] == "long" else 1):
            self.event({"choices": [{"text": word}]})
            time.sleep(0.02)
        if (body.get("stream_options") or {}).get("include_usage"):
            self.event({"choices": [], "usage": USAGE})
        self.piece(b"data: [DONE]\n\n")
        self.piece(b"")

    def wait(self):
        self.connection.settimeout(20)
        note(left=self.connection.recv(1) == b"")

    def event(self, value):
        self.piece(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")

    def piece(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def answer(self, status, body):
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


if __name__ == "__main__":
    note(options=sys.argv[1:])
    if "--fail" in sys.argv:
        sys.exit("CUDA out of memory")
    if "--hang" in sys.argv:
        time.sleep(600)
    with socketserver.ThreadingUnixStreamServer(sys.argv[sys.argv.index("--uds") + 1], Handler) as server:
        server.daemon_threads = True
        server.serve_forever()
