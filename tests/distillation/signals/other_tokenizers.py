"""Tokenizers that differ from that of the tiny models: other text, another size, other special tokens, the
kind of SentencePiece."""

import functools
import string
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode


@functools.cache
def _byte_level(vocabulary, specials):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = Path(string.__file__).read_text() + " naïve café" * 300 + " the language of models" * 300
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer.to_str()


def byte_level(vocabulary=400, specials=("<s>", "</s>"), bos=False):
    """Byte-level BPE; with ``bos`` every text begins with the first special token."""
    content = Tokenizer.from_str(_byte_level(vocabulary, specials))
    if bos:
        content.post_processor = processors.TemplateProcessing(
            single=f"{specials[0]} $A", special_tokens=[(specials[0], 0)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=content, bos_token=specials[0], eos_token=specials[1], model_max_length=128
    )


def sentencepiece():
    """Pieces with blanks as "▁", one in front of every text, and bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set(string.ascii_letters + string.digits + string.punctuation + "▁ï"))
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "f"), ("i", "n"), ("in", "g"), ("m", "o")]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, *letters])}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    content = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    content.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    content.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=content, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=128
    )


def bytes_of(tokenizer):
    """The bytes of each token of a byte-level tokenizer, special ones None: an implementation of its own."""
    alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
    special = set(tokenizer.all_special_tokens)
    return {
        number: None if token in special else bytes(alphabet[character] for character in token)
        for token, number in tokenizer.get_vocab().items()
    }
