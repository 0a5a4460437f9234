"""Filling in the middle: the prompt for a text between a prefix and a suffix, of models with its tokens.

FILES PREFIX_TOKEN prefix SUFFIX_TOKEN suffix MIDDLE_TOKEN     (Bavarian et al. 2022, 2207.14255, PSM)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attar.serving.http.errors import ApiError
from attar.serving.http.service import Service
from attar.serving.http.tokenizer import ServerTokenizer


@dataclass(frozen=True)
class InfillTokens:
    """Token ids. ``repository`` and ``file`` begin these where a model has been taught several files."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None


_TEXTS = (
    # Qwen, CodeGemma
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),
    # StarCoder, Granite; SantaCoder
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", "<file_sep>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # DeepSeek, Code Llama
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)
_ENDS = (
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|file_sep|>", "<file_sep>", "<|file_separator|>"),
    *("<|repo_name|>", "<reponame>", "\u2581<EOT>"),
)
"""Tokens at which a text between prefix and suffix ends, as in llama.cpp, besides the model's end tokens."""


def infill_tokens(tokenizer: ServerTokenizer) -> InfillTokens | None:
    """The tokens of a model; None: it has none."""
    for texts in _TEXTS:
        prefix, suffix, middle, *several = (tokenizer.token(text) for text in texts)
        if prefix is not None and suffix is not None and middle is not None:
            repository, file = several if several and None not in several else (None, None)
            return InfillTokens(prefix, suffix, middle, repository, file)
    return None


def infill_ends(tokenizer: ServerTokenizer) -> tuple[int, ...]:
    """Tokens that end a text between prefix and suffix."""
    ids = [tokenizer.token(text) for text in _ENDS]
    return tuple(id for id in ids if id is not None)


async def infill_prompt(
    service: Service,
    prefix: str,
    suffix: str,
    *,
    begun: str = "",
    files: Sequence[tuple[str, str]] = (),
    param: str = "suffix",
) -> list[int]:
    """Token ids of a prompt that the text between prefix and suffix follows.

    Args:
        begun: how that text begins.
        files: names and texts of others that the model may read.
        param: the client's name of the suffix.

    Raises:
        ApiError: 400, the model has no such tokens, or the prompt is too long.
    """
    tokens = infill_tokens(service.tokenizer)
    if tokens is None:
        message = f"the model {service.model!r} has no tokens for filling in the middle"
        raise ApiError(400, message, param=param, code="invalid_value")

    async def encode(text: str) -> list[int]:
        return await service.encode_text(text, None, special=False) if text else []

    ids: list[int] = await service.encode_text("", None)  # the tokenizer's token before a text
    if files and tokens.repository is not None and tokens.file is not None:
        ids += [tokens.repository, *await encode("repository\n")]
        for name, text in files:
            ids += [tokens.file, *await encode(f"{name}\n{text}\n")]
        ids += [tokens.file, *await encode("file\n")]
    else:
        for name, text in files:
            ids += await encode(f"{name}\n{text}\n")
    parts = ((tokens.prefix, prefix), (tokens.suffix, suffix), (tokens.middle, begun))
    for token, text in parts:
        ids += [token, *await encode(text)]
    return service.check_prompt(ids)
