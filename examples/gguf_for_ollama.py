"""A GGUF file for Ollama and llama.cpp, and what it lost of the model.

python examples/gguf_for_ollama.py MODEL OUT [--type Q4_K_M]
"""

import argparse
from pathlib import Path

import attar

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("out", type=Path)
parser.add_argument("--type", default="Q4_K_M")
parser.add_argument("--samples", type=int, default=128, help="rows of text that the importance matrix reads")
args = parser.parse_args()

file = args.out / "model.gguf"
attar.export(args.model, file, format="gguf", type=args.type, samples=args.samples)
lost = attar.evaluate(file, reference=args.model, tokens=2048, speed=False, sample="")
print(f"{file}: {lost.bytes / 1e6:.1f} MB, KL to the original {lost.kl_mean:.4f} nats a token")
print(f"ollama create mine -f {file.with_suffix('.Modelfile')}")
