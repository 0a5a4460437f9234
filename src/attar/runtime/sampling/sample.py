"""Tokens sampled from distributions, with noise that depends on the position and not on the batch.

    token = argmax_v  p_v / e_v        e_v ~ Exp(1), equally argmax log p_v + g_v with Gumbel noise g = -log e

is a draw from p (the Gumbel-max trick; Gumbel 1954, Maddison et al. arXiv 1411.0030). The noise is a pure
function of four integers:

    key = BLAKE2b-64(seed, sample, position, purpose)
    bits_v = SplitMix64 seeded with key, output v        (Steele et al. 2014; counter-based: any v by itself)
    u_v = (floor(bits_v / 2^11) + 1/2) / 2^53 ,  e_v = -log u_v

position is the index of the sampled token in its sequence, the prompt counted; sample is the index of the
completion. So a seeded completion depends neither on the other rows of the batch, nor on preemption, nor on
how many tokens a step verifies; a prompt extended by its own completion continues with the same noise.
Coupled speculation samples draft and target with one key: where p and q agree the tokens agree, and the
result is the result of plain decoding. Only tokens with p_v > 0 get noise (the generator is counter-based),
and a logarithm is taken only of tokens that can still win: with c = e_m / p_m of the most likely token m, a
token v that beats m has 1 - u_v <= e_v <= c p_v.

Letters: R rows, V vocabulary, p probabilities, u uniform in (0, 1).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attar.runtime.sampling.warp import SamplingRow, adjust, largest_indices, likeliest, warp

TOKEN, ACCEPT, RESAMPLE = 0, 1, 2
"""Purposes, each with its own noise: the token; a verifier's acceptance test; its residual sample."""


def noise_key(seed: int, sample: int, position: int, purpose: int = TOKEN) -> int:
    """The noise stream of one sample: an integer in [0, 2^64).

    Args:
        seed: of the request, in [0, 2^64).
        sample: index of the completion in [0, n).
        position: index of the sampled token in its sequence.
        purpose: TOKEN, ACCEPT or RESAMPLE.
    """
    packed = struct.pack("<QIQI", seed, sample, position, purpose)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def uniforms(key: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """u of the tokens, of the same shape: in (0, 1), computed in integers up to the last step."""
    z = tokens.astype(np.uint64)
    z += _INCREMENT
    z *= _GAMMA
    return _unit(_mixed_(z, key))


def draw(p: Tensor, keys: Sequence[int]) -> list[int]:
    """One token of each row.

    Args:
        p: probabilities (R, V), or weights that are not normalised; not modified.
    """
    return [_draw_one(row, key) for row, key in zip(p.cpu().numpy(), keys, strict=True)]


def draw_distinct(p: Tensor, key: int, count: int) -> list[int]:
    """Several tokens without replacement, in order: the first of one race (Gumbel top-k).

    Args:
        p: probabilities (V,), or weights that are not normalised; not modified.
        key: the stream; the first token is the token of ``draw`` with this key.
        count: tokens; fewer are returned where fewer have p > 0.
    """
    tokens, race = _race(p.cpu().numpy(), key, count)
    best = np.argsort(-race, kind="stable")[:count]
    drawn: list[int] = tokens[best].tolist()
    return drawn


def sample(logits: Tensor, rows: Sequence[SamplingRow], keys: Sequence[int]) -> list[int]:
    """Warp and draw: a token for each row. Rows at temperature 0 take the most likely token, without noise.

    Args:
        logits: (R, V); not modified.
        rows: one for each row.
        keys: one for each row; not used where the row is greedy.

    Raises:
        NumericsError: as :func:`warp`.
    """
    greedy = [index for index, row in enumerate(rows) if row.params.greedy]
    if len(greedy) == len(rows):
        return likeliest(adjust(logits, rows))
    tokens: dict[int, int] = {}
    if greedy:
        best = likeliest(adjust(logits[greedy], [rows[index] for index in greedy]))
        tokens |= zip(greedy, best, strict=True)
    random = [index for index, row in enumerate(rows) if not row.params.greedy]
    for part in _parts(random, logits.device.type):
        some = logits[part] if len(part) > 1 else logits[part[0] : part[0] + 1]  # a view of one row
        p = warp(some, [rows[index] for index in part])
        tokens |= zip(part, draw(p, [keys[index] for index in part]), strict=True)
    return [tokens[index] for index in range(len(rows))]


def _parts(rows: list[int], device: str) -> list[list[int]]:
    """Rows that are warped together: all of them; on a CPU one at a time, which stays in its cache."""
    return [[row] for row in rows] if device == "cpu" else [rows]


def _draw_one(p: NDArray[np.float32], key: int) -> int:
    """A token from one row (V,)."""
    tokens, race = _race(p, key)
    return int(tokens[race.argmax()])


def _race(p: NDArray[np.float32], key: int, count: int = 1) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens that include the first ``count`` of the race, and -e / p of each, largest where p / e is."""
    possible = int(np.count_nonzero(p))
    if 4 * possible < len(p):
        tokens = np.flatnonzero(p)
        u = uniforms(key, tokens)
    else:
        bits = _mixed_(_counters(len(p)).copy(), key)
        tokens = _contenders(p, bits, min(count, possible))
        u = _unit(bits[tokens])
    race = np.log(u)
    race /= p[tokens]
    return tokens, race


def _contenders(p: NDArray[np.float32], bits: NDArray[np.uint64], count: int) -> NDArray[np.int64]:
    """Tokens that may be among the first ``count``: all others lose to ``count`` of the most likely ones."""
    likely = largest_indices(p, count)
    c = float((-np.log(_unit(bits[likely])) / p[likely]).max())
    below_one = (_TWO_53 - bits.view(np.int64)).astype(np.float32)  # 1 - u, in steps of 2^-53
    return np.flatnonzero(below_one <= p * np.float32(c * 2.0**53 * _SLACK))


def _mixed_(z: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """The upper 53 bits of SplitMix64's outputs, from their counters times gamma; in place."""
    z += np.uint64(key)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        z ^= z >> np.uint64(shift)
        z *= factor
    z ^= z >> np.uint64(31)
    z >>= np.uint64(11)
    return z


def _unit(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    u = bits.astype(np.float64)
    u += 0.5
    u *= 2.0**-53
    return u


@lru_cache(maxsize=4)
def _counters(count: int) -> NDArray[np.uint64]:
    """(v + 1) gamma of tokens [0, count)."""
    counters = np.arange(1, count + 1, dtype=np.uint64) * _GAMMA
    counters.flags.writeable = False
    return counters


_TWO_53 = np.int64(1 << 53)
_SLACK = 1.0 + 1e-5  # for the rounding of float32 in the bound
_INCREMENT = np.uint64(1)
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
