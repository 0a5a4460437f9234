"""Steps over a paged pool for the tests of attention, and what attention is, in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attar.kernels import kv_int4
from attar.kernels.kv_codes import encode
from attar.runtime.step import ancestors, depths


@dataclass
class PagedStep:
    """The arguments of ``paged_attention`` and their meaning.

    Attributes:
        seen: of each token, pairs of the entries' keys and values, float64 (n, g, d), and positions.
        queries: (T, h, d), in no basis.
    """

    arguments: list
    seen: list[tuple[Tensor, Tensor, Tensor]]
    queries: Tensor

    @classmethod
    def random(cls, spans, *, h=4, g=2, d=32, B=16, store=torch.float32, dtype=torch.float32, sinks=False,
               window=0, soft_cap=0.0, words=0, spare=1):  # fmt: skip
        """spans: (entries before the span, its tokens, parents or None) of each sequence."""
        longest = max(before + count for before, count, _ in spans)
        X = -(-longest // B) + spare
        shuffled = torch.randperm(len(spans) * X)
        tables = shuffled.view(len(spans), X).int()
        shape = (len(spans) * X, B, g, d)
        plain = torch.randn(2, *shape)
        scales, factors, basis = (None, None), None, None
        if store == torch.uint8:
            factors, centers = torch.rand(g, d) + 0.5, torch.randn(2, g, d)
            basis = torch.stack((factors, 1 / factors, *kv_int4.rotated(centers * factors)), dim=1)
            parts = (plain[0], factors, centers), (plain[1],)
            plane, scales = zip(*(kv_int4.encode(*part) for part in parts), strict=True)
            meaning = [
                kv_int4.decode(c, s, *part[1:]).double()
                for c, s, part in zip(plane, scales, parts, strict=True)
            ]
        elif store in (torch.int8, torch.float8_e4m3fn):
            codes, scales = zip(*(encode(part, store) for part in plain), strict=True)
            plane, meaning = (
                list(codes),
                [c.double() * s.double() for c, s in zip(codes, scales, strict=True)],
            )
        else:
            plane = [part.to(store) for part in plain]
            meaning = [part.double() for part in plane]
        keys, values = (part.flatten(0, 1) for part in meaning)
        columns = {name: [] for name in ("spans", "positions", "lengths", "firsts", "tree")}
        seen, total = [], 0
        for number, (before, count, parents) in enumerate(spans):
            own_depths = torch.from_numpy(depths(count, parents))
            entries = torch.arange(before + count)
            slots = tables[number].long()[entries // B] * B + entries % B
            places = torch.cat([torch.arange(before), before + own_depths])
            family = None if parents is None else torch.from_numpy(ancestors(parents))
            for i in range(count):
                position = before + int(own_depths[i])
                mask = entries <= before + i if family is None else (entries < before)
                if family is not None:
                    mask[before:] = family[i]
                if window:
                    mask &= places > position - window
                seen.append((keys[slots[mask]], values[slots[mask]]))
                bits = [0] * words
                for j in range(count) if family is not None else ():
                    if family[i, j]:
                        bits[j // 32] |= 1 << j % 32
                columns["spans"].append(number)
                columns["positions"].append(position)
                columns["lengths"].append(before + i + 1 if family is None else before)
                columns["firsts"].append(total)
                columns["tree"].append([word - (1 << 32) if word >> 31 else word for word in bits])
            total += count
            if window:  # released early
                tables[number, : max(0, before - window + 1) // B] = -1
        q = torch.randn(total, h, d) * d**-0.5
        turned = q if factors is None else kv_int4.rotated(q / factors.repeat_interleave(h // g, 0))
        ints = {name: torch.tensor(column, dtype=torch.int32) for name, column in columns.items()}
        ints["tree"] = ints["tree"].view(total, words)
        extra = torch.randn(h) if sinks else None
        numbers = [turned.to(dtype), *plane, *scales, basis, tables, *ints.values()]
        return cls([*numbers, extra, window, soft_cap], seen, q.to(dtype) if basis is None else q)

    def expected(self) -> Tensor:
        """float64 (T, h, d)."""
        q, sinks, soft_cap = self.queries.double(), self.arguments[-3], self.arguments[-1]
        rows = []
        for t, (k, v) in enumerate(self.seen):
            times = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
            score = torch.einsum("hd,nhd->hn", q[t], k)
            if soft_cap:
                score = soft_cap * torch.tanh(score / soft_cap)
            if sinks is not None:
                score = torch.cat([score, sinks.double()[:, None]], 1)
            p = score.softmax(1)[:, : len(k)]
            rows.append(torch.einsum("hn,nhd->hd", p, v))
        return torch.stack(rows)

    def part(self, tokens: slice) -> list:
        """The arguments of some tokens alone, as another step would have them."""
        q, *pool = self.arguments[:6]
        tables, spans, positions, lengths, firsts, tree, sinks, window, cap = self.arguments[6:]
        rows = spans[tokens].unique()
        again = torch.searchsorted(rows, spans[tokens]).int()
        first = firsts[tokens] - firsts[tokens].min()
        cut = [part[tokens].contiguous() for part in (positions, lengths, tree)]
        head = [q[tokens].contiguous(), *pool, tables[rows.long()].contiguous(), again]
        return [*head, cut[0], cut[1], first, cut[2], sinks, window, cap]
