"""Three methods of other papers in plain numpy, one row: StreamingLLM, SnapKV and Quest, with lists of token positions.

N query heads share K KV heads, G = N // K in a row each; all is float64. A method is made of a prompt's queries [T, N, H],
keys and values [T, K, H], is given every new token's key and value [K, H] by `append`, and then asked for the attention
output of that token's query [N, H]. Positions count from 0 at the prompt's first token.
"""

from __future__ import annotations

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the softmax over the last axis; a logit of -inf has no weight."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Returns the exact attention [..., H] of queries [..., H] over the keys and values [n, H]."""
    return softmax(q @ k.T / q.shape[-1] ** 0.5) @ v


def rotate(x: np.ndarray, turns: np.ndarray, theta: float) -> np.ndarray:
    """Returns x [n, ..., H] turned by `turns` [n] positions; channels i and i + H/2 are a pair, of frequency theta^(-2i/H)."""
    half = x.shape[-1] // 2
    angles = np.asarray(turns, np.float64)[:, None] * theta ** (-2 * np.arange(half) / x.shape[-1])
    angles = angles.reshape(len(x), *[1] * (x.ndim - 2), half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1)


def best(scores: np.ndarray, count: int) -> list[int]:
    """Returns the `count` indices of largest score [n], sorted; of equal ones the lower, and all if there are fewer."""
    return sorted(np.argsort(-scores, kind="stable")[:count].tolist())


class Tokens:
    """State: keys and values [n, K, H] of every token seen, kept or not."""

    def __init__(self, k: np.ndarray, v: np.ndarray) -> None:
        self.k, self.v = np.asarray(k, np.float64), np.asarray(v, np.float64)

    def __len__(self) -> int:
        return len(self.k)

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """Appends tokens [n, K, H]."""
        self.k, self.v = np.concatenate([self.k, k]), np.concatenate([self.v, v])

    def grouped(self, q: np.ndarray) -> np.ndarray:
        """Returns queries [..., N, H] as [..., K, G, H]."""
        return np.asarray(q, np.float64).reshape(*q.shape[:-2], self.k.shape[1], -1, q.shape[-1])


class Streaming:
    """StreamingLLM: the first `sinks` tokens and the newest `budget - sinks`; with `theta` at positions inside the cache."""

    def __init__(
        self, sinks: int, budget: int, theta: float | None = None, *, q: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> None:
        del q  # no query decides anything
        if not 0 <= sinks < budget:
            raise ValueError(f"the budget {budget} holds no token besides {sinks} sinks")
        self.sinks, self.budget, self.theta, self.tokens = sinks, budget, theta, Tokens(k, v)

    def kept(self) -> list[int]:
        """Returns the kept positions, the same for every head."""
        n = len(self.tokens)
        return [p for p in range(n) if p < self.sinks or p >= n - (self.budget - self.sinks)]

    def selected(self, q: np.ndarray) -> list[list[int]]:
        """Returns the positions that each query head attends to."""
        return [self.kept()] * len(q)

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """Appends a token's key and value [K, H]."""
        self.tokens.append(k[None], v[None])

    def attend(self, q: np.ndarray) -> np.ndarray:
        """Returns the attention [N, H] of the newest token's queries over the kept tokens."""
        kept = np.asarray(self.kept())
        k, v = self.tokens.k[kept], self.tokens.v[kept]
        if self.theta is not None:
            # The query stands at the newest position: there a key belongs as far before it as it is inside the cache.
            newest = len(self.tokens) - 1
            inside = len(kept) - 1 - np.arange(len(kept))
            k = rotate(k, newest - inside - kept, self.theta)
        heads = [attention(x, k[:, h], v[:, h]) for h, x in enumerate(self.tokens.grouped(q))]
        return np.concatenate(heads)


def observed(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Returns each key's weight [G, n], summed over the last w tokens' queries [w, G, H], each over the keys up to itself."""
    n, w = len(k), len(q)
    logits = np.einsum("wgh,nh->wgn", q, k) / q.shape[-1] ** 0.5
    seen = np.arange(n) <= np.arange(n - w, n)[:, None]
    return softmax(np.where(seen[:, None], logits, -np.inf)).sum(0)


def pool(weights: np.ndarray, kernel: int, pooling: str) -> np.ndarray:
    """Returns the weights [G, n] pooled over `kernel` neighbours; for a mean what is outside counts as 0, not for a maximum."""
    if kernel % 2 != 1 or pooling not in ("avg", "max"):
        raise ValueError(f"kernel {kernel} and pooling {pooling!r}: want an odd one, and 'avg' or 'max'")
    if not weights.shape[-1]:
        return weights
    outside = 0.0 if pooling == "avg" else -np.inf
    sides = np.full((len(weights), kernel // 2), outside)
    views = np.lib.stride_tricks.sliding_window_view(np.concatenate([sides, weights, sides], axis=1), kernel, axis=1)
    return views.sum(-1) / kernel if pooling == "avg" else views.max(-1)


class SnapKV:
    """SnapKV: of a prompt the last `window` tokens, and the best others by these tokens' attention, for each KV head."""

    def __init__(
        self,
        budget: int,
        window: int = 32,
        kernel: int = 5,
        pooling: str = "avg",
        group: str = "mean",
        *,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
    ) -> None:
        if not 0 < window <= budget:
            raise ValueError(f"the budget {budget} does not hold the window {window}")
        self.budget, self.window, self.kernel, self.pooling = budget, window, kernel, pooling
        self.group = {"mean": np.mean, "max": np.max, "sum": np.sum}[group]
        self.tokens = Tokens(k, v)
        self.positions = [np.arange(len(k)) for _ in range(k.shape[1])]
        self._evict(self.tokens.grouped(q))

    def scores(self, q: np.ndarray, head: int) -> np.ndarray:
        """Returns the pooled scores [n - w] of the kept tokens of a KV head before the last w, whose queries are [w, G, H]."""
        weights = observed(q, self.tokens.k[self.positions[head], head])
        agreed = self.group(weights[:, : weights.shape[1] - len(q)], axis=0)
        return pool(agreed[None], self.kernel, self.pooling)[0]

    def _evict(self, q: np.ndarray) -> None:
        """Applies the rule to the kept tokens, of which the last n have the queries [n, K, G, H]."""
        for head, positions in enumerate(self.positions):
            if len(positions) <= self.budget:
                continue
            w = min(self.window, len(q))
            chosen = best(self.scores(q[len(q) - w :, head], head), self.budget - w)
            self.positions[head] = np.concatenate([positions[chosen], positions[len(positions) - w :]])

    def kept(self, head: int) -> list[int]:
        """Returns the kept positions of a KV head."""
        return self.positions[head].tolist()

    def selected(self, q: np.ndarray) -> list[list[int]]:
        """Returns the positions that each query head attends to."""
        heads = range(self.tokens.k.shape[1])
        return [self.kept(head) for head in heads for _ in range(len(q) // len(heads))]

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """Appends a token's key and value [K, H]; nothing leaves."""
        self.positions = [np.append(positions, len(self.tokens)) for positions in self.positions]
        self.tokens.append(k[None], v[None])

    def attend(self, q: np.ndarray) -> np.ndarray:
        """Returns the attention [N, H] of the newest token's queries over the kept tokens."""
        kept = [(self.tokens.k[p, h], self.tokens.v[p, h]) for h, p in enumerate(self.positions)]
        return np.concatenate([attention(x, k, v) for x, (k, v) in zip(self.tokens.grouped(q), kept, strict=True)])

    def extend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Appends n tokens [n, K, H], returns the attention [n, N, H] of their queries [n, N, H], and applies the rule anew."""
        outputs = []
        for i in range(len(q)):
            self.append(k[i], v[i])
            outputs.append(self.attend(q[i]))
        self._evict(self.tokens.grouped(q))
        return np.stack(outputs)


class Quest:
    """Quest: pages in order of position, chosen for each query head by bounds of their keys, and a window of the newest tokens.

    The window's front slots are empty while it has held too few tokens. A page may be empty for that reason: it has its number,
    and is never selected.
    """

    def __init__(self, page_size: int = 16, *, pages: int, window: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        del q  # only new queries choose
        if window < page_size:
            raise ValueError(f"the window {window} does not hold a page of {page_size}")
        self.page_size, self.count, self.fill, self.tokens = page_size, pages, window - page_size, Tokens(k, v)
        self.start = max(len(k) - self.fill, 0)  # of the window
        self.pages = [list(range(i, min(i + page_size, self.start))) for i in range(0, self.start, page_size)]
        self.steps = 0

    def window(self) -> list[int]:
        """Returns the positions of the tokens in the window."""
        return list(range(self.start, len(self.tokens)))

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """Appends a token's key and value [K, H] to the window."""
        self.tokens.append(k[None], v[None])
        self.steps += 1

    def end_step(self) -> None:
        """Moves the window's oldest slots behind the other pages, as a page, in every `page_size`-th step."""
        if self.steps and self.steps % self.page_size == 0:
            end = max(len(self.tokens) - self.fill, 0)
            self.pages.append(list(range(self.start, end)))
            self.start = end

    def scores(self, q: np.ndarray) -> np.ndarray:
        """Returns each page's bound of q.k [N, pages]; -inf for an empty page."""
        grouped = self.tokens.grouped(q)
        found = np.full((*grouped.shape[:2], len(self.pages)), -np.inf)
        for i, page in enumerate(self.pages):
            if page:
                low, high = self.tokens.k[page].min(0), self.tokens.k[page].max(0)
                found[:, :, i] = np.maximum(grouped * low[:, None], grouped * high[:, None]).sum(-1)
        return found.reshape(len(q), len(self.pages))

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        """Returns the numbers of each query head's pages, sorted."""
        return [[i for i in best(scores, self.count) if self.pages[i]] for scores in self.scores(q)]

    def selected(self, q: np.ndarray) -> list[list[int]]:
        """Returns the positions that each query head attends to."""
        return [[p for i in chosen for p in self.pages[i]] + self.window() for chosen in self.chosen(q)]

    def attend(self, q: np.ndarray) -> np.ndarray:
        """Returns the attention [N, H] of the newest token's queries, each over its head's pages and the window."""
        outputs, group = [], len(q) // self.tokens.k.shape[1]
        for n, positions in enumerate(self.selected(q)):
            k, v = self.tokens.k[positions, n // group], self.tokens.v[positions, n // group]
            outputs.append(attention(np.asarray(q[n], np.float64), k, v))
        return np.stack(outputs)
