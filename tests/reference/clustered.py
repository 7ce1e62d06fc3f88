"""The clustered policy in plain numpy, one row and one KV head, with lists where the policy has fixed shapes.

Tests of the clustered, coded and tolerant policies compare each step with it; other helpers use its functions.
"""

from __future__ import annotations

import numpy as np

from icejax.cache.registry import Clustered
from icejax.ops.pages import packing, tree
from icejax.ops.pages.channel_scaling import FEWEST, LEAST, MOST
from icejax.ops.pages.digests import OUTLIERS, TAIL_CLAMP, TIED
from icejax.ops.pages.value_fit import RIDGE


def halve(keys: np.ndarray, order: np.ndarray, late: np.ndarray, part: int, levels: int) -> np.ndarray:
    """Returns `order` halved `levels` times along the keys' main axis, down to parts of size `part`, late items always last."""
    if levels == 0 or not len(order):
        return order
    valid, x = late[order] == 0, keys[order].astype(np.float32)
    centred = np.where(valid[:, None], x - x[valid].sum(0) / max(valid.sum(), 1), 0).astype(np.float32)
    axis = centred[np.square(centred).sum(-1).argmax()]
    for _ in range(packing.POWER_ITERATIONS):
        axis = centred.T @ (centred @ axis)
        axis = axis / (np.linalg.norm(axis) + 1e-30)
    order = order[np.lexsort((np.where(valid, centred @ axis, 0), late[order]))]
    half = part * 2 ** (levels - 1)
    return np.concatenate([halve(keys, x, late, part, levels - 1) for x in (order[:half], order[half:])])


def neighbours(keys: np.ndarray, order: np.ndarray, late: np.ndarray, size: int) -> list[np.ndarray]:
    """Returns groups of `order`: the free item farthest from the mean with its nearest, and so on; late items come last."""
    grouped, free = [], [i for i in order if late[i] == 0]
    middle = keys[free].astype(np.float32).mean(0) if free else 0
    while free:
        x = keys[free].astype(np.float32)
        seed = x[np.square(x - middle).sum(-1).argmax()]
        grouped += [free[i] for i in np.argsort(np.square(x).sum(-1) - 2 * x @ seed, kind="stable")[:size]]
        free = [i for i in free if i not in set(grouped[-size:])]
    grouped += sorted((i for i in order if late[i] > 0), key=lambda i: late[i])
    return [np.asarray(grouped[i : i + size]) for i in range(0, len(grouped), size)]


def arrange(keys: np.ndarray, late: np.ndarray, size: int, block: int) -> list[np.ndarray]:
    """Returns groups of similar keys, similar groups in runs of 8, similar runs in runs. In `late` 1 is partial, 2 empty."""
    levels = max(0, round(np.log2(len(keys) / block)))
    part = -(-len(keys) // (2**levels * size)) * size
    order = halve(keys, np.arange(len(keys)), late, part, levels)
    groups = [group for i in range(0, len(order), part) for group in neighbours(keys, order[i : i + part], late, size)]
    if len(groups) <= tree.FAN_OUT:
        return groups
    is_full = [(late[group] == 0).all() and len(group) == size for group in groups]
    means = np.stack([keys[group].mean(0) * full for group, full in zip(groups, is_full, strict=True)])
    group_late = np.asarray([0 if full else 1 + (late[group] == 2).all() for group, full in zip(groups, is_full, strict=True)])
    return [groups[i] for node in arrange(means, group_late, tree.FAN_OUT, packing.NODE_BLOCK) for i in node]


def pack(keys: np.ndarray, valid: np.ndarray, size: int) -> list[np.ndarray]:
    """Returns the tokens of each page, empty pages included."""
    return [page[valid[page]] for page in arrange(keys, np.where(valid, 0, 2), size, packing.BLOCK)]


def factors_of(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Returns the powers of two that bring channels of keys [T, H] to the size of the queries [T, G, H]."""
    off = np.log2(np.square(q.astype(np.float64)).mean((0, 1)) / k.astype(np.float64).var(0)) / 4
    off = off - np.median(off) if len(k) >= FEWEST else 0 * off
    return np.where(np.abs(off) < LEAST, 1.0, 2.0 ** np.clip(np.round(off), -MOST, MOST))


def outliers_first(keys: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    """Returns the tokens of a node, outliers first; `parts` are its children in this order, or the single tokens of a page."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return np.zeros(0, int)
    tokens = np.concatenate(parts)
    candidates, outliers = np.concatenate([part[:OUTLIERS] for part in parts]), []
    distance = np.square(keys[candidates] - keys[tokens].mean(0)).sum(-1)
    for _ in range(min(OUTLIERS, len(tokens))):
        farthest = (distance >= TIED * distance.max()).argmax()
        outliers.append(candidates[farthest])
        distance[farthest] = -1
    return np.concatenate([outliers, tokens[~np.isin(tokens, outliers)]])


def bands(size: int) -> np.ndarray:
    """Returns which channels are in which band, bool [n, H]: up to eight runs of channels, the same in both halves."""
    halves = 1 if size % 2 else 2
    count = max(n for n in (1, 2, 4, 8) if size // halves % n == 0)
    return np.arange(count)[:, None] == (np.arange(size) % (size // halves) * count // (size // halves))[None, :]


def others(tokens: np.ndarray) -> np.ndarray:
    """Returns the inliers of a node in the order of `outliers_first`; all tokens if it has no more than its outliers."""
    return tokens[OUTLIERS:] if len(tokens) > OUTLIERS else tokens


class Fit:
    """Values from keys: ridge regression within pages, shrunk by how badly even pages predict odd ones and odd even.

    `shape` [H, H] is the scatter of keys about the means of their pages, divided by its trace.
    """

    def __init__(self, size: int, value_size: int) -> None:
        self.keys, self.values, self.agreement = np.zeros((size, size)), np.zeros((size, value_size)), np.zeros(2)
        self.matrix, self.shape = self.values, np.eye(size) / size

    def add(self, k: np.ndarray, v: np.ndarray, pages: list[np.ndarray]) -> None:
        halves = []
        for parity in (0, 1):
            filled = [page for page in pages[parity::2] if len(page)]
            x, y = (np.concatenate([a[page] - a[page].mean(0) for page in filled] or [a[:0]]) for a in (k, v))
            halves.append((x.T @ x, x.T @ y))
        for (keys, values), other_half in zip(halves, halves[::-1], strict=True):
            matrix = self.solve(*other_half)
            self.agreement += (matrix * values).sum(), (matrix * (keys @ matrix)).sum()
        self.keys, self.values = (old + a + b for old, a, b in zip((self.keys, self.values), *halves, strict=True))
        self.shape = self.keys / np.trace(self.keys) if self.keys.any() else self.shape
        self.matrix = self.solve(0, 0) * np.clip(self.agreement[0] / max(self.agreement[1], 1e-30), 0, 1)

    def solve(self, keys: np.ndarray | int, values: np.ndarray | int) -> np.ndarray:
        keys = self.keys + keys
        return np.linalg.solve(keys + max(RIDGE * np.diag(keys).mean(), 1e-20) * np.eye(len(keys)), self.values + values)


class Reference:
    """State: keys and values of every token, and which tokens are sinks, in each page and in the window."""

    def __init__(self, policy: Clustered, q: np.ndarray, k: np.ndarray, v: np.ndarray, length: int, *, clock: int = 0) -> None:
        """Takes queries [T, G, H], keys and values [T, H]; `clock` is the batch's clock when the row joined."""
        self.factors = factors_of(q[:length], k[:length]) if policy.balance else np.ones(k.shape[1])
        k, policy = k * self.factors, policy.for_platform("cpu", latent=False)
        self.policy, self.k, self.v = policy, k[:length].astype(np.float64), v[:length].astype(np.float64)
        fill = policy.window_layout.fill
        start = max(length - fill, min(policy.window_layout.sinks, length))
        self.sinks, self.window = list(range(min(policy.window_layout.sinks, length))), list(range(start, length))
        middle = start - len(self.sinks)
        padded = np.zeros_like(k)
        padded[:middle] = k[len(self.sinks) : start]
        self.pages = [p + len(self.sinks) for p in pack(padded, np.arange(len(k)) < middle, policy.page_size)]
        self.fit = Fit(k.shape[1], v.shape[1])
        self.fit.add(self.k, self.v, self.pages)
        # Pages that the batch filled before the row joined are empty, and its next page will be partial.
        self.pages += [np.zeros(0, int)] * (clock // policy.page_size)
        self.steps = clock
        self.nodes: dict[bytes, np.ndarray] = {}
        self.summaries: dict[bytes, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.bands = bands(k.shape[1])

    def node(self, parts: list[np.ndarray]) -> np.ndarray:
        """Returns `outliers_first`, computed once per node."""
        key = b"".join(part.tobytes() for part in parts)
        if key not in self.nodes:
            self.nodes[key] = outliers_first(self.k, parts)
        return self.nodes[key]

    def summary(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns mean and variance of a node's inlier keys, and the mean of all its values; computed once per node."""
        key = tokens.tobytes()
        if key not in self.summaries:
            k = self.k[others(tokens)]
            self.summaries[key] = k.mean(0), k.var(0), self.v[tokens].mean(0)
        return self.summaries[key]

    def score(self, q: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns two estimates of a node's log-sum-exp [2, G]: to choose pages by, and to weigh the tail by."""
        if not len(tokens):
            return np.full((2, len(q)), -np.inf)
        s = q / q.shape[-1] ** 0.5
        first, second = np.log(len(tokens)) + s @ self.summary(tokens)[0], 0.5 * self.score_variance(q, tokens)
        return np.maximum([first + second, first + np.minimum(second, TAIL_CLAMP)], (s @ self.k[tokens[:OUTLIERS]].T).max(-1))

    def key_shift(self, q: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the shift [G, H] of a node's mean key under softmax weights, to first order and bounded."""
        s, bound = (
            q / q.shape[-1] ** 0.5,
            np.sqrt(np.minimum(1, TAIL_CLAMP / np.maximum(0.5 * self.score_variance(q, tokens), 1e-30))),
        )
        shape = (self.fit.shape + np.diag(np.diag(self.fit.shape))) / 2
        return s @ shape * self.summary(tokens)[1].sum() * bound[:, None]

    def told(self, keys: np.ndarray) -> np.ndarray:
        """Returns the differences of values that the fit predicts from differences of keys."""
        return keys @ self.fit.matrix if self.policy.value_fit else np.zeros(self.v.shape[1])

    def score_variance(self, q: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the variance [G] of a node's scores: its width per band, spread over channels as in the whole head."""
        s, channel_width = q / q.shape[-1] ** 0.5, np.diag(self.fit.shape)
        return (s**2 * channel_width @ self.bands.T / (channel_width @ self.bands.T)) @ (self.bands @ self.summary(tokens)[1])

    def best(self, scores: np.ndarray, count: int) -> np.ndarray:
        """Returns the `count` candidates of largest softmax summed over the group, empty ones left out."""
        filled = np.flatnonzero(~np.isneginf(scores[0]))
        if not len(filled):
            return filled
        share = np.exp(scores[:, filled] - scores[:, filled].max(-1, keepdims=True))
        share = (share / share.sum(-1, keepdims=True)).sum(0)
        return filled[np.argsort(-share, kind="stable")[:count]]

    def step(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Appends a token and returns the attention output [G, H] of its queries."""
        self._put(k, v)
        out, _ = self.look(q.astype(np.float64) / self.factors, np.asarray([*self.sinks, *self.window], int))
        self._turn()
        return out

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """Appends a token; a `step` without its output, which takes longest."""
        self._put(k, v)
        self._turn()

    def _put(self, k: np.ndarray, v: np.ndarray) -> None:
        self.k, self.v = np.vstack([self.k, k * self.factors]), np.vstack([self.v, v])
        self.window.append(len(self.k) - 1)

    def _turn(self) -> None:
        """Ends a step: moves a page out of the window, and compacts pages, if it is time."""
        self.steps += 1
        if self.steps % self.policy.page_size == 0:
            end = len(self.k) - self.policy.window_layout.fill  # end of the window's oldest page
            page, self.window = [t for t in self.window if t < end], [t for t in self.window if t >= end]
            self.pages.append(np.asarray(page, int))
        if self.policy.compact_every and self.steps % self.policy.compact_every == 0:
            count = self.policy.compact_every // self.policy.page_size
            tokens = np.concatenate(self.pages[-count:])
            keys = np.zeros((self.policy.compact_every, self.k.shape[-1]))
            keys[: len(tokens)] = self.k[tokens]
            packed = pack(keys, np.arange(len(keys)) < len(tokens), self.policy.page_size)
            self.pages[-count:] = [tokens[page] for page in packed]
            self.fit.add(self.k, self.v, self.pages[-count:])

    def walk(self, q: np.ndarray, count: int) -> tuple[list[np.ndarray], list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """Returns the tokens of the best `count` pages, and log-sum-exp [G], tokens, value [G, H] of all other nodes."""
        levels = [[self.node(list(page[:, None])) for page in self.pages]]
        while len(levels[-1]) > tree.TOP:
            runs = range(0, len(levels[-1]), tree.FAN_OUT)
            levels.append([self.node(levels[-1][i : i + tree.FAN_OUT]) for i in runs])
        candidates, rest = list(range(len(levels[-1]))), []
        num_opened = max(self.policy.opened, 2 * -(-max(count, self.policy.num_ranked(2**20)) // tree.FAN_OUT))
        for level in range(len(levels) - 1, -1, -1):
            nodes = [levels[level][i] for i in candidates]
            pairs = [self.score(q, tokens) for tokens in nodes]
            estimates, scores = np.stack(pairs, axis=2) if pairs else np.zeros((2, len(q), 0))
            if level:
                opened = set(self.best(estimates, num_opened).tolist())
                rest += [(scores[:, i], nodes[i]) for i in range(len(nodes)) if i not in opened]
                firsts, num_children = [candidates[i] * tree.FAN_OUT for i in opened], len(levels[level - 1])
                candidates = sorted(c for f in firsts for c in range(f, f + tree.FAN_OUT) if c < num_children)
        best = self.best(estimates, count)
        rest += [(scores[:, i], nodes[i]) for i in range(len(nodes)) if i not in set(best.tolist())]
        rest = [(s, tokens) for s, tokens in rest if len(tokens)] if self.policy.tail else []
        # Softmax weights shift the mean key of a node, and so its mean value.
        rest = [(s, tokens, self.summary(tokens)[2] + self.told(self.key_shift(q, tokens))) for s, tokens in rest]
        return [nodes[i] for i in best], rest

    @property
    def keys_first(self) -> bool:
        """Whether keys are fetched for more pages than values are."""
        return self.policy.keys_first

    def look(self, q: np.ndarray, resident: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the attention output [G, H] of queries, and `uneven` [G]; `resident` tokens are attended exactly.

        `uneven` is the root of the summed squared differences between true weights and weights in use, over the norm of the
        output. For pages that are not fetched it is the expectation under normally distributed scores.
        """
        ranked = self.policy.num_ranked if self.keys_first else self.policy.num_fetched
        pages, rest = self.walk(q, ranked(len(self.pages)))
        # The best ranked tokens are attended exactly. The others of a page have their true weight and their mean value, or the
        # page's mean value if their values are not fetched.
        fetched = np.concatenate([np.zeros(0, int), *pages])
        s = q @ self.k.T / q.shape[-1] ** 0.5
        all_scores = np.concatenate([s[:, resident], s[:, fetched], *(s[:, None] for s, *_ in rest)], axis=1)
        share = np.exp(s[:, fetched] - all_scores.max(-1, keepdims=True))
        share /= np.exp(all_scores - all_scores.max(-1, keepdims=True)).sum(-1, keepdims=True)
        selected = fetched[np.argsort(-share.sum(0), kind="stable")[: self.policy.budget - len(resident)]]
        base = np.logaddexp.reduce(all_scores, axis=1)
        uneven = sum(np.exp(2 * (x - base)) * self.share_variance(q, tokens) for x, tokens, _ in rest)
        unselected = [(np.setdiff1d(page, selected), page) for page in pages] if self.policy.tail else []
        for tokens, page in unselected:
            if not len(tokens):
                continue
            page = page if self.keys_first else tokens
            total = np.logaddexp.reduce(s[:, tokens], axis=1)
            key = np.exp(s[:, tokens] - total[:, None]) @ self.k[tokens] - self.k[page].mean(0)
            uneven = uneven + np.square(np.exp(s[:, tokens] - base[:, None])).sum(1) - np.exp(2 * (total - base)) / len(tokens)
            rest.append((total, tokens, self.v[page].mean(0) + self.told(key)))
        exact = np.concatenate([resident, selected])
        logits = np.concatenate([s[:, exact], *(s[:, None] for s, *_ in rest)], axis=1)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out = weights[:, : len(exact)] @ self.v[exact]
        out += sum(w[:, None] * value for w, (*_, value) in zip(weights[:, len(exact) :].T, rest, strict=True))
        out /= weights.sum(-1, keepdims=True)
        return out, np.sqrt(np.maximum(uneven, 0)) / np.linalg.norm(out, axis=-1)

    def share_variance(self, q: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the summed variance [G] of single tokens' shares of a node, for normally distributed scores."""
        return np.minimum(np.expm1(np.minimum(self.score_variance(q, tokens), 2 * TAIL_CLAMP)) / len(tokens), 1)
