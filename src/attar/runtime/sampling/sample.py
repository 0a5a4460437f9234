"""Tokens drawn from distributions, with noise that belongs to a place and not to a batch.

    token = argmax_v  p_v / e_v        e_v ~ Exp(1), equally argmax log p_v + g_v with Gumbel noise g = -log e

is a draw from p (the Gumbel-max trick; Gumbel 1954, Maddison et al. arXiv 1411.0030). The noise is a pure
function of four integers:

    key = BLAKE2b-64(seed, sample, position, purpose)
    bits_v = SplitMix64 seeded with key, output v        (Steele et al. 2014; counter-based: any v by itself)
    u_v = (floor(bits_v / 2^11) + 1/2) / 2^53 ,  e_v = -log u_v

position is the index of the drawn token in its sequence, the prompt counted; sample numbers the n texts of a
request. So a seeded text depends neither on its neighbours in the batch, nor on preemption, nor on how many
tokens a step verifies; a prompt lengthened by what was generated continues with the same noise. Coupled
speculation draws draft and target with one key: where p and q agree the tokens agree, and the text is that of
plain decoding. Only tokens with p_v > 0 get noise, which a counter makes possible at no loss.

Letters: R rows, V vocabulary, p probabilities, u uniform in (0, 1).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attar.runtime.sampling.warp import Row, adjust, check, greedy, warp

TOKEN, ACCEPT, RESAMPLE = 0, 1, 2
"""Purposes: the token itself; a verifier's coin; its draw from the residual. Streams of their own."""


def noise_key(seed: int, sample: int, position: int, purpose: int = TOKEN) -> int:
    """The stream of noise for one draw: an integer in [0, 2^64).

    Args:
        seed: of the request, in [0, 2^64).
        sample: which of the request's n texts.
        position: index of the drawn token in its sequence.
        purpose: TOKEN, ACCEPT or RESAMPLE.
    """
    packed = struct.pack("<QIQI", seed, sample, position, purpose)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def uniforms(key: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """u of the tokens, of the same shape: in (0, 1), integers up to the last step."""
    z = tokens.astype(np.uint64)
    z += _ONE
    z *= _GAMMA
    z += np.uint64(key)
    z ^= z >> np.uint64(30)
    z *= _MIX_1
    z ^= z >> np.uint64(27)
    z *= _MIX_2
    z ^= z >> np.uint64(31)
    z >>= np.uint64(11)
    u = z.astype(np.float64)
    u += 0.5
    u *= 2.0**-53
    return u


def draw(p: Tensor, keys: Sequence[int]) -> list[int]:
    """One token from each row.

    Args:
        p: probabilities (R, V), or weights that are not normalised; not modified.
        keys: one stream for each row.
    """
    return [_draw_one(row, key) for row, key in zip(p.cpu().numpy(), keys, strict=True)]


def sample(logits: Tensor, rows: Sequence[Row], keys: Sequence[int]) -> list[int]:
    """Warp and draw: a token for each row. Rows at temperature 0 take the likeliest without any noise.

    Args:
        logits: (R, V); not modified.
        rows: one for each row.
        keys: one for each row; not looked at where the row is greedy.

    Raises:
        NumericsError: as :func:`warp`.
    """
    drawn = [number for number, row in enumerate(rows) if not row.params.greedy]
    if len(drawn) == len(rows):
        return draw(warp(logits, rows), keys)
    adjusted = adjust(logits, rows)
    check(adjusted)
    tokens: list[int] = greedy(adjusted).tolist()
    if drawn:
        p = warp(logits[drawn], [rows[number] for number in drawn])
        for number, token in zip(drawn, draw(p, [keys[number] for number in drawn]), strict=True):
            tokens[number] = token
    return tokens


def _draw_one(p: NDArray[np.float32], key: int) -> int:
    """A token from one row (V,)."""
    tokens = np.flatnonzero(p > 0)
    race = np.log(uniforms(key, tokens))
    race /= p[tokens]  # -e / p: the largest is where p / e is
    return int(tokens[race.argmax()])


_ONE = np.uint64(1)
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
