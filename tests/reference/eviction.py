"""Evicting methods of other papers in plain float64 numpy, one row, for tests/cache/test_eviction_policies.py.

Shapes, positions and the calls `append` and `attend` are those of `tests.reference.peers`; `extend` does both for a text. Each
KV head has a list of kept positions and their scores.
"""

from __future__ import annotations

import numpy as np

from tests.reference.peers import Tokens, best, observed, pool, rotate, softmax

GROUPS = {"mean": np.mean, "max": np.max, "sum": np.sum}


class Evicting:
    """State: for every KV head the kept positions in order, and their scores."""

    room = True  # whether decoded tokens are kept beyond the budget

    def __init__(self, budget: int, *, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        self.budget, self.tokens, heads = budget, Tokens(k, v), range(k.shape[1])
        self.positions = [list(range(len(k))) for _ in heads]
        self.scores = [np.zeros(len(k)) for _ in heads]
        self._text(self.tokens.grouped(q))

    def rank(self, q: np.ndarray) -> None:
        """Sets the scores of all tokens after a text with queries [n, K, G, H]."""
        raise NotImplementedError

    def step(self, weights: list[np.ndarray]) -> None:
        """Sets the scores after a decoded token, from its query heads' attention weights [G, n] for each KV head."""

    def ranking(self, head: int) -> np.ndarray:
        """Returns the ranking of a KV head's tokens: the lowest is evicted first."""
        return self.scores[head]

    def sizes(self) -> list[int]:
        """Returns the number of tokens that each KV head keeps after a text."""
        return [self.budget] * len(self.positions)

    def kept(self, head: int) -> list[int]:
        """Returns the kept positions of a KV head."""
        return self.positions[head]

    def selected(self, q: np.ndarray) -> list[list[int]]:
        """Returns the positions that each query head attends to."""
        heads = range(len(self.positions))
        return [self.kept(head) for head in heads for _ in range(len(q) // len(heads))]

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """Appends a token's key and value [K, H]; without room the token of lowest rank is evicted."""
        for head, positions in enumerate(self.positions):
            if not self.room and len(positions) == self.budget:
                self._keep(head, len(positions) - 1)
            self.positions[head] = [*self.positions[head], len(self.tokens)]
            self.scores[head] = np.append(self.scores[head], 0.0)
        self.tokens.append(k[None], v[None])

    def attend(self, q: np.ndarray) -> np.ndarray:
        """Returns the attention [N, H] of the newest token's queries over the kept tokens, and updates the scores."""
        weights = [self.weights(q[None], head)[0] for head, q in enumerate(self.tokens.grouped(q))]
        self.step(weights)
        return np.concatenate([w @ self.tokens.v[self.positions[head], head] for head, w in enumerate(weights)])

    def extend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Appends n tokens [n, K, H], returns the attention [n, N, H] of their queries [n, N, H], then evicts tokens again."""
        q, count, n = self.tokens.grouped(q), len(self.tokens), len(k)
        self.tokens.append(k, v)
        self.positions = [[*positions, *range(count, count + n)] for positions in self.positions]
        self.scores = [np.append(scores, np.zeros(n)) for scores in self.scores]
        values = [self.tokens.v[positions, head] for head, positions in enumerate(self.positions)]
        outputs = [self.weights(q[:, head], head) @ values[head] for head in range(len(values))]
        self._text(q)
        return np.concatenate(outputs, axis=1)

    def weights(self, q: np.ndarray, head: int) -> np.ndarray:
        """Returns the causal weights [n, G, S] of the newest n tokens' queries [n, G, H] over a KV head's tokens."""
        positions = np.asarray(self.positions[head])
        logits = np.einsum("ngh,sh->ngs", q, self.keys(head, len(q))) / q.shape[-1] ** 0.5
        causal = positions <= np.arange(len(self.tokens) - len(q), len(self.tokens))[:, None]
        return softmax(np.where(causal[:, None], logits, -np.inf))

    def keys(self, head: int, count: int) -> np.ndarray:
        """Returns a KV head's keys for the queries of the newest `count` tokens."""
        del count
        return self.tokens.k[self.positions[head], head]

    def _text(self, q: np.ndarray) -> None:
        self.rank(q)
        for head, size in enumerate(self.sizes()):
            self._keep(head, size)

    def _keep(self, head: int, count: int) -> None:
        indices = best(self.ranking(head), count)
        self.positions[head] = [self.positions[head][i] for i in indices]
        self.scores[head] = self.scores[head][indices]


class H2O(Evicting):
    """H2O: attention weights summed over all queries; the newest `recent` tokens stay."""

    room = False

    def __init__(self, budget: int, recent: int, group: str = "mean", **heads: np.ndarray) -> None:
        self.recent, self.group = recent, GROUPS[group]
        super().__init__(budget, **heads)

    def rank(self, q: np.ndarray) -> None:
        for head, scores in enumerate(self.scores):
            self.scores[head] = scores + self.group(self.weights(q[:, head], head).sum(0), axis=0)

    def step(self, weights: list[np.ndarray]) -> None:
        self.scores = [scores + self.group(w, axis=0) for scores, w in zip(self.scores, weights, strict=True)]

    def ranking(self, head: int) -> np.ndarray:
        newest = np.arange(len(self.scores[head]))[::-1] < self.recent
        return np.where(newest, np.inf, self.scores[head])


class TOVA(Evicting):
    """TOVA: the newest query's weights, per KV head or one mean for the layer."""

    room = False

    def __init__(self, budget: int, group: str = "layer", **heads: np.ndarray) -> None:
        self.group = group
        super().__init__(budget, **heads)

    def rank(self, q: np.ndarray) -> None:
        self.step([self.weights(q[-1:, head], head)[0] for head in range(len(self.scores))])

    def step(self, weights: list[np.ndarray]) -> None:
        head_scores = [GROUPS[self.group](w, axis=0) for w in weights] if self.group != "layer" else None
        self.scores = head_scores or [np.concatenate(weights).mean(0)] * len(weights)


class KeyDiff(Evicting):
    """KeyDiff: minus the cosine between a key and the mean of all keys' directions."""

    def rank(self, q: np.ndarray) -> None:
        for head, positions in enumerate(self.positions):
            keys = self.tokens.k[positions, head]
            keys = keys / np.linalg.norm(keys, axis=1, keepdims=True)
            mean = keys.mean(0)
            self.scores[head] = -keys @ mean / np.linalg.norm(mean)


class AdaKV(Evicting):
    """AdaKV with SnapKV's score: heads compete for slots beside the window, of which the share `floor` is split evenly."""

    def __init__(self, budget: int, window: int, floor: float, **heads: np.ndarray) -> None:
        self.window, self.floor = window, floor
        super().__init__(budget, **heads)

    def rank(self, q: np.ndarray) -> None:
        w = min(self.window, len(q))
        for head, positions in enumerate(self.positions):
            weights = observed(q[len(q) - w :, head], self.tokens.k[positions, head])
            pooled = pool(weights[:, : len(positions) - w], 5, "avg").mean(0)
            self.scores[head] = np.append(pooled, np.full(w, np.inf))

    def sizes(self) -> list[int]:
        slots, lengths = self.budget - self.window, [len(scores) for scores in self.scores]
        if sum(lengths) <= self.budget * len(lengths):
            return lengths
        ranked = [np.sort(scores)[::-1][self.window :] for scores in self.scores]
        heads = np.repeat(np.arange(len(ranked)), [len(x) for x in ranked])
        counts = np.bincount(heads[best(np.concatenate(ranked), slots * len(ranked))], minlength=len(ranked)).astype(np.float32)
        return (self.window + np.round(counts * np.float32(1 - self.floor)) + int(slots * self.floor)).astype(int).tolist()


class ExpectedAttention(Evicting):
    """Expected attention: a Gaussian of the queries before RoPE; mean and covariance get the mean future rotation."""

    def __init__(self, budget: int, sinks: int, future: int, theta: float, **heads: np.ndarray) -> None:
        self.sinks, self.future, self.theta = sinks, future, theta
        super().__init__(budget, **heads)

    def rank(self, q: np.ndarray) -> None:
        num_tokens, size = len(self.tokens), q.shape[-1]
        positions = np.arange(num_tokens - len(q), num_tokens)
        unrotated = rotate(q, -positions, self.theta)[positions >= self.sinks]  # n K G H
        future = range(num_tokens, num_tokens + self.future)
        rotation = np.mean([rotate(np.eye(size), np.full(size, p), self.theta).T for p in future], axis=0)
        for head, head_positions in enumerate(self.positions):
            ranked, weights = np.asarray(head_positions) >= self.sinks, []
            if not ranked.any():
                continue
            keys, values = self.tokens.k[head_positions, head][ranked], self.tokens.v[head_positions, head][ranked]
            for group in range(unrotated.shape[2]):
                mean = rotation @ unrotated[:, head, group].mean(0)
                covariance = rotation @ np.cov(unrotated[:, head, group].T, bias=True) @ rotation.T
                weights.append(softmax(keys @ mean / size**0.5 + np.sum(keys @ covariance * keys, axis=1) / size / 2))
            self.scores[head] = np.full(len(head_positions), np.inf)
            self.scores[head][ranked] = np.mean(weights, axis=0) * np.linalg.norm(values, axis=1)


class ReSTKV(Evicting):
    """ReST-KV: the change of each query head's projected output without a token, by a moving average of weights."""

    def __init__(
        self,
        budget: int,
        window: int,
        kernel: int = 5,
        *,
        alpha: float = 0.3,
        tau: float = 1.0,
        scale: int,
        output: np.ndarray,
        **heads: np.ndarray,
    ) -> None:
        """Takes the output projection `output` [N, H, D] as well."""
        self.window, self.kernel, self.alpha, self.tau, self.scale = window, kernel, alpha, tau, scale
        self.output = output.astype(np.float64)
        super().__init__(budget, **heads)

    def rank(self, q: np.ndarray) -> None:
        w = min(self.window, len(q))
        for head, positions in enumerate(self.positions):
            n, values = len(positions) - w, self.tokens.v[positions, head]
            if not n:
                continue
            weights, scores = self.weights(q[len(q) - w :, head], head), []
            for group in range(q.shape[2]):
                average = weights[0, group, :n]
                for weight in weights[1:, group, :n]:
                    average = self.alpha * weight + (1 - self.alpha) * average
                change = (average @ values[:n] - values[:n]) @ self.output[head * q.shape[2] + group]
                score = average / (1 - average) * np.linalg.norm(change, axis=1) ** self.tau
                scores.append(self.pool(score, self.shift(weights[:, group])))
            self.scores[head] = np.append(np.mean(scores, axis=0), np.full(w, np.inf))

    def shift(self, weights: np.ndarray) -> int:
        """Returns how far left the top tokens of the weights [w, n] move between halves of the queries, over `scale`."""
        half = len(weights) // 2
        if not half:
            return 0
        indices = np.argsort(-weights, axis=1, kind="stable")[:, : self.budget - self.window].mean(1)
        return int((indices[:half].mean() - indices[-half:].mean()) / self.scale)

    def pool(self, score: np.ndarray, shift: int) -> np.ndarray:
        """Returns the mean over neighbours in a window moved by the shift; the end values are repeated as padding."""
        kernel = max(self.kernel, 2 * abs(shift) + 1)
        padded = np.pad(score, (kernel // 2 - shift, kernel // 2 + shift), mode="edge")
        return np.lib.stride_tricks.sliding_window_view(padded, kernel).mean(-1)


class LaCache(Evicting):
    """LaCache: a ladder pattern marks tokens that leave; they are evicted in order when new tokens need room."""

    room = False

    def __init__(
        self, budget: int, sinks: int, recent: int, rungs: int, layer: int, theta: float | None, **heads: np.ndarray
    ) -> None:
        self.theta = theta
        self.size, self.sinks, self.recent, self.rungs, self.layer = budget - 1, sinks, recent, rungs, layer
        self.cursor, self.leaving = sinks, []
        super().__init__(budget, **heads)

    def rank(self, q: np.ndarray) -> None:
        stay, already_leaving = [p for p in self.positions[0] if p not in self.leaving], list(self.leaving)
        max_count = max(self.size - self.recent - self.cursor, 0)
        excess, removable = len(stay) - self.size, max_count * (self.rungs - 1)
        if 0 < excess <= removable:
            self.climb(stay, self.cursor, int(np.ceil(excess / (self.rungs - 1))), self.rungs)
        elif excess > 0:
            stay = self.climb(stay, self.cursor, max_count, self.rungs)
            rounds = int(np.ceil((excess - removable) / ((self.size - self.recent - self.sinks) * (self.rungs - 1))))
            rungs = self.rungs + (rounds - 1) * (self.rungs - 1)
            self.climb(stay, self.sinks, int(np.ceil((excess - removable) / (rungs - 1))), rungs)
        self.leaving = already_leaving + sorted(set(self.leaving) - set(already_leaving))
        self.set_scores()

    def climb(self, stay: list[int], start: int, count: int, rungs: int) -> list[int]:
        """Returns the tokens that stay: from index `start` on, one of every `rungs`, `count` times; all others stay."""
        indices = [start + rungs * i + self.layer % rungs for i in range(count)]
        staying = stay[:start] + [stay[i] for i in indices] + stay[start + rungs * count :]
        self.leaving += [p for p in stay if p not in staying]
        self.cursor = start + count
        return staying

    def step(self, weights: list[np.ndarray]) -> None:
        self.leaving = [p for p in self.leaving if p in self.positions[0]]
        if len(self.positions[0]) == self.budget and not self.leaving:
            restart = self.size - self.recent - self.cursor < 1
            self.climb(self.positions[0], self.sinks if restart else self.cursor, 1, self.rungs)
        self.set_scores()

    def set_scores(self) -> None:
        order = [self.leaving.index(p) if p in self.leaving else np.inf for p in self.positions[0]]
        self.scores = [np.asarray(order, np.float64)] * len(self.positions)

    def keys(self, head: int, count: int) -> np.ndarray:
        positions, keys = np.asarray(self.positions[head]), super().keys(head, count)
        if self.theta is None:
            return keys
        num_before = len(positions) - count
        turns = len(self.tokens) - count - num_before + np.arange(num_before) - positions[:num_before]
        return rotate(keys, np.append(turns, np.zeros(count)), self.theta)
