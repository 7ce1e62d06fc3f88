"""Evicting methods of other papers in plain numpy, one row: lists of token positions and their scores for every KV head.

N query heads share K KV heads, G = N // K in a row each; all is float64. A method is made of a prompt's queries [T, N, H], keys
and values [T, K, H], is given every new token's key and value [K, H] by `append`, and then asked for the attention output of
that token's query [N, H]; `extend` does both for a text. Positions count from 0 at the prompt's first token.
"""

from __future__ import annotations

import numpy as np

from tests.reference.peers import Tokens, best, observed, pool, rotate, softmax

GROUPS = {"mean": np.mean, "max": np.max, "sum": np.sum}


class Evicting:
    """State: for every KV head the kept positions in order, and a score of each."""

    room = True  # whether decoded tokens are kept without another one's leaving

    def __init__(self, budget: int, *, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        self.budget, self.tokens, heads = budget, Tokens(k, v), range(k.shape[1])
        self.positions = [list(range(len(k))) for _ in heads]
        self.scores = [np.zeros(len(k)) for _ in heads]
        self._text(self.tokens.grouped(q))

    def rank(self, q: np.ndarray) -> None:
        """Sets the scores of all tokens after a text whose queries are [n, K, G, H]."""
        raise NotImplementedError

    def step(self, weights: list[np.ndarray]) -> None:
        """Sets the scores after a decoded token, by what its query heads weighed each KV head's tokens [G, n]."""

    def worth(self, head: int) -> np.ndarray:
        """Returns what a KV head's tokens are worth: the least leaves first."""
        return self.scores[head]

    def sizes(self) -> list[int]:
        """Returns how many tokens each KV head keeps after a text."""
        return [self.budget] * len(self.positions)

    def kept(self, head: int) -> list[int]:
        """Returns the kept positions of a KV head."""
        return self.positions[head]

    def selected(self, q: np.ndarray) -> list[list[int]]:
        """Returns the positions that each query head attends to."""
        heads = range(len(self.positions))
        return [self.kept(head) for head in heads for _ in range(len(q) // len(heads))]

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """Appends a token's key and value [K, H], for which the least one leaves where there is no room."""
        for head, positions in enumerate(self.positions):
            if not self.room and len(positions) == self.budget:
                self._keep(head, len(positions) - 1)
            self.positions[head] = [*self.positions[head], len(self.tokens)]
            self.scores[head] = np.append(self.scores[head], 0.0)
        self.tokens.append(k[None], v[None])

    def attend(self, q: np.ndarray) -> np.ndarray:
        """Returns the attention [N, H] of the newest token's queries over the kept tokens, and takes note of it."""
        weights = [self.weights(q[None], head)[0] for head, q in enumerate(self.tokens.grouped(q))]
        self.step(weights)
        return np.concatenate([w @ self.tokens.v[self.positions[head], head] for head, w in enumerate(weights)])

    def extend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Appends n tokens [n, K, H], returns the attention [n, N, H] of their queries [n, N, H], and applies the rule anew."""
        q, count, n = self.tokens.grouped(q), len(self.tokens), len(k)
        self.tokens.append(k, v)
        self.positions = [[*positions, *range(count, count + n)] for positions in self.positions]
        self.scores = [np.append(scores, np.zeros(n)) for scores in self.scores]
        values = [self.tokens.v[positions, head] for head, positions in enumerate(self.positions)]
        outputs = [self.weights(q[:, head], head) @ values[head] for head in range(len(values))]
        self._text(q)
        return np.concatenate(outputs, axis=1)

    def weights(self, q: np.ndarray, head: int) -> np.ndarray:
        """Returns the weights [n, G, S] of the newest n tokens' queries [n, G, H] over a KV head's tokens up to each."""
        positions = np.asarray(self.positions[head])
        logits = np.einsum("ngh,sh->ngs", q, self.keys(head, len(q))) / q.shape[-1] ** 0.5
        seen = positions <= np.arange(len(self.tokens) - len(q), len(self.tokens))[:, None]
        return softmax(np.where(seen[:, None], logits, -np.inf))

    def keys(self, head: int, count: int) -> np.ndarray:
        """Returns a KV head's keys as the newest `count` tokens' queries see them."""
        del count
        return self.tokens.k[self.positions[head], head]

    def _text(self, q: np.ndarray) -> None:
        self.rank(q)
        for head, size in enumerate(self.sizes()):
            self._keep(head, size)

    def _keep(self, head: int, count: int) -> None:
        chosen = best(self.worth(head), count)
        self.positions[head] = [self.positions[head][i] for i in chosen]
        self.scores[head] = self.scores[head][chosen]


class H2O(Evicting):
    """H2O: weights summed over all queries; the newest `recent` tokens stay."""

    room = False

    def __init__(self, budget: int, recent: int, group: str = "mean", **heads: np.ndarray) -> None:
        self.recent, self.group = recent, GROUPS[group]
        super().__init__(budget, **heads)

    def rank(self, q: np.ndarray) -> None:
        for head, scores in enumerate(self.scores):
            self.scores[head] = scores + self.group(self.weights(q[:, head], head).sum(0), axis=0)

    def step(self, weights: list[np.ndarray]) -> None:
        self.scores = [scores + self.group(w, axis=0) for scores, w in zip(self.scores, weights, strict=True)]

    def worth(self, head: int) -> np.ndarray:
        newest = np.arange(len(self.scores[head]))[::-1] < self.recent
        return np.where(newest, np.inf, self.scores[head])


class TOVA(Evicting):
    """TOVA: the newest query's weights, for every KV head or of one set for the layer."""

    room = False

    def __init__(self, budget: int, group: str = "layer", **heads: np.ndarray) -> None:
        self.group = group
        super().__init__(budget, **heads)

    def rank(self, q: np.ndarray) -> None:
        self.step([self.weights(q[-1:, head], head)[0] for head in range(len(self.scores))])

    def step(self, weights: list[np.ndarray]) -> None:
        of_heads = [GROUPS[self.group](w, axis=0) for w in weights] if self.group != "layer" else None
        self.scores = of_heads or [np.concatenate(weights).mean(0)] * len(weights)


class KeyDiff(Evicting):
    """KeyDiff: minus the cosine of a key and the mean of all keys' directions."""

    def rank(self, q: np.ndarray) -> None:
        for head, positions in enumerate(self.positions):
            keys = self.tokens.k[positions, head]
            keys = keys / np.linalg.norm(keys, axis=1, keepdims=True)
            mean = keys.mean(0)
            self.scores[head] = -keys @ mean / np.linalg.norm(mean)


class AdaKV(Evicting):
    """AdaKV over SnapKV's score: what a head wins of all heads' best beside the window, in part, and an even floor."""

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
        even, lengths = self.budget - self.window, [len(scores) for scores in self.scores]
        if sum(lengths) <= self.budget * len(lengths):
            return lengths
        beside = [np.sort(scores)[::-1][self.window :] for scores in self.scores]
        of = np.repeat(np.arange(len(beside)), [len(x) for x in beside])
        won = np.bincount(of[best(np.concatenate(beside), even * len(beside))], minlength=len(beside)).astype(np.float32)
        return (self.window + np.round(won * np.float32(1 - self.floor)) + int(even * self.floor)).astype(int).tolist()


class ExpectedAttention(Evicting):
    """Expected attention: a Gaussian of the queries before RoPE, its mean and covariance turned by a mean rotation."""

    def __init__(self, budget: int, sinks: int, future: int, theta: float, **heads: np.ndarray) -> None:
        self.sinks, self.future, self.theta = sinks, future, theta
        super().__init__(budget, **heads)

    def rank(self, q: np.ndarray) -> None:
        seen, size = len(self.tokens), q.shape[-1]
        positions = np.arange(seen - len(q), seen)
        plain = rotate(q, -positions, self.theta)[positions >= self.sinks]  # n K G H
        at = range(seen, seen + self.future)
        turn = np.mean([rotate(np.eye(size), np.full(size, p), self.theta).T for p in at], axis=0)  # takes a column
        for head, kept in enumerate(self.positions):
            others, weights = np.asarray(kept) >= self.sinks, []
            if not others.any():
                continue
            keys, values = self.tokens.k[kept, head][others], self.tokens.v[kept, head][others]
            for group in range(plain.shape[2]):
                mean = turn @ plain[:, head, group].mean(0)
                covariance = turn @ np.cov(plain[:, head, group].T, bias=True) @ turn.T
                weights.append(softmax(keys @ mean / size**0.5 + np.sum(keys @ covariance * keys, axis=1) / size / 2))
            self.scores[head] = np.full(len(kept), np.inf)
            self.scores[head][others] = np.mean(weights, axis=0) * np.linalg.norm(values, axis=1)


class ReSTKV(Evicting):
    """ReST-KV: how much each query head's projected output changes without a token, by a moving average of weights."""

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
        """Takes the `output` matrix [N, H, D] too."""
        self.window, self.kernel, self.alpha, self.tau, self.scale = window, kernel, alpha, tau, scale
        self.output = output.astype(np.float64)
        super().__init__(budget, **heads)

    def rank(self, q: np.ndarray) -> None:
        w = min(self.window, len(q))
        for head, positions in enumerate(self.positions):
            n, values = len(positions) - w, self.tokens.v[positions, head]
            if not n:
                continue
            weights, found = self.weights(q[len(q) - w :, head], head), []
            for group in range(q.shape[2]):
                average = weights[0, group, :n]
                for each in weights[1:, group, :n]:
                    average = self.alpha * each + (1 - self.alpha) * average
                change = (average @ values[:n] - values[:n]) @ self.output[head * q.shape[2] + group]
                score = average / (1 - average) * np.linalg.norm(change, axis=1) ** self.tau
                found.append(self.pool(score, self.shift(weights[:, group])))
            self.scores[head] = np.append(np.mean(found, axis=0), np.full(w, np.inf))

    def shift(self, weights: np.ndarray) -> int:
        """Returns how far the tokens of most weight [w, n] move to the left between the halves of the queries, in places."""
        half = len(weights) // 2
        if not half:
            return 0
        best = np.argsort(-weights, axis=1, kind="stable")[:, : self.budget - self.window].mean(1)
        return int((best[:half].mean() - best[-half:].mean()) / self.scale)

    def pool(self, score: np.ndarray, shift: int) -> np.ndarray:
        """Returns the mean over neighbours, on which side there are more of by the shift; ends are repeated."""
        kernel = max(self.kernel, 2 * abs(shift) + 1)
        padded = np.pad(score, (kernel // 2 - shift, kernel // 2 + shift), mode="edge")
        return np.lib.stride_tricks.sliding_window_view(padded, kernel).mean(-1)


class LaCache(Evicting):
    """LaCache: lists of positions that stay, in two parts, and of those that are to leave, which do so in order as others come."""

    room = False

    def __init__(
        self, budget: int, sinks: int, recent: int, rungs: int, layer: int, theta: float | None, **heads: np.ndarray
    ) -> None:
        self.theta = theta
        self.size, self.sinks, self.recent, self.rungs, self.layer = budget - 1, sinks, recent, rungs, layer
        self.cursor, self.leaving = sinks, []
        super().__init__(budget, **heads)

    def rank(self, q: np.ndarray) -> None:
        stay, before = [p for p in self.positions[0] if p not in self.leaving], list(self.leaving)
        once = max(self.size - self.recent - self.cursor, 0)
        over, can = len(stay) - self.size, once * (self.rungs - 1)
        if 0 < over <= can:
            self.climb(stay, self.cursor, int(np.ceil(over / (self.rungs - 1))), self.rungs)
        elif over > 0:
            stay = self.climb(stay, self.cursor, once, self.rungs)
            times = int(np.ceil((over - can) / ((self.size - self.recent - self.sinks) * (self.rungs - 1))))
            rungs = self.rungs + (times - 1) * (self.rungs - 1)
            self.climb(stay, self.sinks, int(np.ceil((over - can) / (rungs - 1))), rungs)
        self.leaving = before + sorted(set(self.leaving) - set(before))
        self.note()

    def climb(self, stay: list[int], start: int, count: int, rungs: int) -> list[int]:
        """Returns what stays of the tokens; of every `rungs` from the number `start` on one does, `count` times."""
        taken = [start + rungs * i + self.layer % rungs for i in range(count)]
        found = stay[:start] + [stay[i] for i in taken] + stay[start + rungs * count :]
        self.leaving += [p for p in stay if p not in found]
        self.cursor = start + count
        return found

    def step(self, weights: list[np.ndarray]) -> None:
        self.leaving = [p for p in self.leaving if p in self.positions[0]]
        if len(self.positions[0]) == self.budget and not self.leaving:
            again = self.size - self.recent - self.cursor < 1
            self.climb(self.positions[0], self.sinks if again else self.cursor, 1, self.rungs)
        self.note()

    def note(self) -> None:
        worth = [self.leaving.index(p) if p in self.leaving else np.inf for p in self.positions[0]]
        self.scores = [np.asarray(worth, np.float64)] * len(self.positions)

    def keys(self, head: int, count: int) -> np.ndarray:
        positions, keys = np.asarray(self.positions[head]), super().keys(head, count)
        if self.theta is None:
            return keys
        before = len(positions) - count
        turns = len(self.tokens) - count - before + np.arange(before) - positions[:before]  # to stand behind one another
        return rotate(keys, np.append(turns, np.zeros(count)), self.theta)
