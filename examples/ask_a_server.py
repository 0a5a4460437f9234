"""A server of 4-bit weights, asked by OpenAI's client.

python examples/ask_a_server.py MODEL OUT
"""

import argparse
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai

import attar

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("out", type=Path)
parser.add_argument("--prompt", default="def add(a, b):")
parser.add_argument("--samples", type=int, default=128, help="rows of calibration text")
args = parser.parse_args()

attar.quantize(args.model, args.out / "w4", scheme="W4A16", samples=args.samples)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
command = [
    sys.executable,
    "-m",
    "attar.cli.main",
    "serve",
    args.out / "w4",
    "--name",
    "w4",
    "--port",
    str(port),
]
server = subprocess.Popen(command)
try:
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).raise_for_status()
            break
        except httpx.HTTPError:
            if server.poll() is not None:
                raise SystemExit("the server has ended") from None
            time.sleep(0.2)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none is needed")
    answer = client.completions.create(model="w4", prompt=args.prompt, max_tokens=32, temperature=0)
    print(args.prompt + answer.choices[0].text)
finally:
    server.terminate()
    server.wait()
