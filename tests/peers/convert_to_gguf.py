"""Runs llama.cpp's ``convert_hf_to_gguf.py`` on a model or a draft head.

    python convert_to_gguf.py LLAMA_CPP FOLDER [--target-model-dir TARGET] --outfile FILE

Tokenizers of attar:tiny and of tiny models are of no family that it knows: any pre-tokenizer is taken for
GPT-2's.
"""

import runpy
import sys
from pathlib import Path


def no_sentencepiece(self):
    raise FileNotFoundError("tokenizer.model")


if __name__ == "__main__":
    home = Path(sys.argv.pop(1))
    sys.path[:0] = [str(home), str(home / "gguf-py")]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    TextModel._set_vocab_sentencepiece = no_sentencepiece
    TextModel._set_vocab_glm = TextModel._set_vocab_gpt2
    from conversion.gemma import Gemma4Model

    Gemma4Model.set_vocab = TextModel._set_vocab_gpt2
    runpy.run_path(str(home / "convert_hf_to_gguf.py"), run_name="__main__")
