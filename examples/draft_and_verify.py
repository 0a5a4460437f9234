"""The same text in fewer passes: suffix trees draft, the model verifies.

python examples/draft_and_verify.py MODEL
"""

import argparse
import time

import attar

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("--tokens", type=int, default=96)
parser.add_argument("--prompt", default="for i in range(10):\n    print(i)\n\nfor i in range(10):\n")
args = parser.parse_args()

greedy = attar.SamplingParams(temperature=0, max_tokens=args.tokens)
texts = {}
for name, options in (("plain", {}), ("suffix trees", {"speculate": "suffix"})):
    llm = attar.LLM(args.model, **options)
    begun = time.perf_counter()
    texts[name] = llm.generate([args.prompt], greedy)[0].text
    print(f"{name}: {args.tokens / (time.perf_counter() - begun):.1f} tokens/s")
print("the same text" if len(set(texts.values())) == 1 else "another text")
