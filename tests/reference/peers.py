"""StreamingLLM, SnapKV and Quest in plain numpy, one row: what the tests in tests/cache compare the policies with.

A method is built from a prompt's queries [T, N, H], keys and values [T, K, H]. For each new token the test calls `append` with
its key and value [K, H], then `attend` with its query [N, H], which returns the attention output. Query heads n * G to
n * G + G - 1 share KV head n, G = N // K. All arrays are float64; positions count from 0 at the prompt's first token.
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
    """Returns x [n, ..., H] rotated by `turns` [n] positions; channels i and i + H/2 have frequency theta^(-2i/H)."""
    half = x.shape[-1] // 2
    angles = np.asarray(turns, np.float64)[:, None] * theta ** (-2 * np.arange(half) / x.shape[-1])
    angles = angles.reshape(len(x), *[1] * (x.ndim - 2), half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1)


def best(scores: np.ndarray, count: int) -> list[int]:
    """Returns the sorted indices of the `count` largest scores [n], all if n is smaller; of equal scores the first."""
    return sorted(np.argsort(-scores, kind="stable")[:count].tolist())


class Tokens:
    """Keys and values [n, K, H] of every token so far, evicted or not."""

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
    """StreamingLLM: the first `sinks` tokens and the newest `budget - sinks`; with `theta` keys get cache positions."""

    def __init__(
        self, sinks: int, budget: int, theta: float | None = None, *, q: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> None:
        del q  # queries do not choose the tokens
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
        positions = np.asarray(self.kept())
        k, v = self.tokens.k[positions], self.tokens.v[positions]
        if self.theta is not None:
            # The query keeps its position; each key moves to its distance from the query inside the cache.
            newest = len(self.tokens) - 1
            distances = len(positions) - 1 - np.arange(len(positions))
            k = rotate(k, newest - distances - positions, self.theta)
        heads = [attention(x, k[:, h], v[:, h]) for h, x in enumerate(self.tokens.grouped(q))]
        return np.concatenate(heads)


def observed(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Returns each key's weight [G, n], summed over the queries [w, G, H] of the last w tokens, with causal attention."""
    n, w = len(k), len(q)
    logits = np.einsum("wgh,nh->wgn", q, k) / q.shape[-1] ** 0.5
    causal = np.arange(n) <= np.arange(n - w, n)[:, None]
    return softmax(np.where(causal[:, None], logits, -np.inf)).sum(0)


def pool(weights: np.ndarray, kernel: int, pooling: str) -> np.ndarray:
    """Returns the weights [G, n] pooled over `kernel` neighbours; a mean is padded with 0, a maximum with -inf."""
    if kernel % 2 != 1 or pooling not in ("avg", "max"):
        raise ValueError(f"kernel {kernel} and pooling {pooling!r}: want an odd one, and 'avg' or 'max'")
    if not weights.shape[-1]:
        return weights
    padding = 0.0 if pooling == "avg" else -np.inf
    edges = np.full((len(weights), kernel // 2), padding)
    views = np.lib.stride_tricks.sliding_window_view(np.concatenate([edges, weights, edges], axis=1), kernel, axis=1)
    return views.sum(-1) / kernel if pooling == "avg" else views.max(-1)


class SnapKV:
    """SnapKV: each KV head keeps the last `window` prompt tokens and the others that get most attention from their queries."""

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
        """Returns the pooled scores [n - w] of a KV head's kept tokens before the last w; these have the queries [w, G, H]."""
        weights = observed(q, self.tokens.k[self.positions[head], head])
        head_weights = self.group(weights[:, : weights.shape[1] - len(q)], axis=0)
        return pool(head_weights[None], self.kernel, self.pooling)[0]

    def _evict(self, q: np.ndarray) -> None:
        """Evicts tokens beyond the budget; the queries [n, K, G, H] are those of the last n tokens."""
        for head, positions in enumerate(self.positions):
            if len(positions) <= self.budget:
                continue
            w = min(self.window, len(q))
            selected = best(self.scores(q[len(q) - w :, head], head), self.budget - w)
            self.positions[head] = np.concatenate([positions[selected], positions[len(positions) - w :]])

    def kept(self, head: int) -> list[int]:
        """Returns the kept positions of a KV head."""
        return self.positions[head].tolist()

    def selected(self, q: np.ndarray) -> list[list[int]]:
        """Returns the positions that each query head attends to."""
        heads = range(self.tokens.k.shape[1])
        return [self.kept(head) for head in heads for _ in range(len(q) // len(heads))]

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """Appends a token's key and value [K, H] and evicts nothing."""
        self.positions = [np.append(positions, len(self.tokens)) for positions in self.positions]
        self.tokens.append(k[None], v[None])

    def attend(self, q: np.ndarray) -> np.ndarray:
        """Returns the attention [N, H] of the newest token's queries over the kept tokens."""
        pairs = [(self.tokens.k[p, h], self.tokens.v[p, h]) for h, p in enumerate(self.positions)]
        return np.concatenate([attention(x, k, v) for x, (k, v) in zip(self.tokens.grouped(q), pairs, strict=True)])

    def extend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Appends n tokens [n, K, H], returns the attention [n, N, H] of their queries [n, N, H], then evicts tokens again."""
        outputs = []
        for i in range(len(q)):
            self.append(k[i], v[i])
            outputs.append(self.attend(q[i]))
        self._evict(self.tokens.grouped(q))
        return np.stack(outputs)


class Quest:
    """Quest: each query head selects pages by a bound of their keys, and attends to a window of the newest tokens as well.

    Pages are in order of position. The window's oldest slots are empty until it has held enough tokens; a page made of empty
    slots is numbered like the others and never selected.
    """

    def __init__(self, page_size: int = 16, *, pages: int, window: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        del q  # only the queries of new tokens choose pages
        if window < page_size:
            raise ValueError(f"the window {window} does not hold a page of {page_size}")
        self.page_size, self.count, self.fill, self.tokens = page_size, pages, window - page_size, Tokens(k, v)
        self.start = max(len(k) - self.fill, 0)  # first position of the window
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
        """Appends the window's oldest slots to the pages as a new page, in every `page_size`-th step."""
        if self.steps and self.steps % self.page_size == 0:
            end = max(len(self.tokens) - self.fill, 0)
            self.pages.append(list(range(self.start, end)))
            self.start = end

    def scores(self, q: np.ndarray) -> np.ndarray:
        """Returns each page's upper bound of q.k [N, pages]; -inf for an empty page."""
        grouped = self.tokens.grouped(q)
        bounds = np.full((*grouped.shape[:2], len(self.pages)), -np.inf)
        for i, page in enumerate(self.pages):
            if page:
                low, high = self.tokens.k[page].min(0), self.tokens.k[page].max(0)
                bounds[:, :, i] = np.maximum(grouped * low[:, None], grouped * high[:, None]).sum(-1)
        return bounds.reshape(len(q), len(self.pages))

    def chosen(self, q: np.ndarray) -> list[list[int]]:
        """Returns the page numbers that each query head selects, sorted."""
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
