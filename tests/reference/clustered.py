"""The clustered policy in plain numpy, one row and one KV head, with lists where the policy has fixed shapes."""

from __future__ import annotations

import numpy as np

from icejax.cache.registry import Clustered
from icejax.ops.pages import packing, tree
from icejax.ops.pages.channel_scaling import FEWEST, LEAST, MOST
from icejax.ops.pages.digests import OUTLIERS, TAIL_CLAMP, TIED
from icejax.ops.pages.value_fit import RIDGE


def halve(keys: np.ndarray, order: np.ndarray, late: np.ndarray, part: int, levels: int) -> np.ndarray:
    """Returns `order`, whose parts are alike, and twos of them, fours, ...; what is late stays last in each."""
    if levels == 0 or not len(order):
        return order
    there, x = late[order] == 0, keys[order].astype(np.float32)
    centred = np.where(there[:, None], x - x[there].sum(0) / max(there.sum(), 1), 0).astype(np.float32)
    axis = centred[np.square(centred).sum(-1).argmax()]
    for _ in range(packing.POWER_ITERATIONS):
        axis = centred.T @ (centred @ axis)
        axis = axis / (np.linalg.norm(axis) + 1e-30)
    order = order[np.lexsort((np.where(there, centred @ axis, 0), late[order]))]
    half = part * 2 ** (levels - 1)
    return np.concatenate([halve(keys, x, late, part, levels - 1) for x in (order[:half], order[half:])])


def neighbours(keys: np.ndarray, order: np.ndarray, late: np.ndarray, size: int) -> list[np.ndarray]:
    """Returns groups of `order`: the free one farthest from the middle, and those nearest to it; what is late at last."""
    found, free = [], [i for i in order if late[i] == 0]
    middle = keys[free].astype(np.float32).mean(0) if free else 0
    while free:
        x = keys[free].astype(np.float32)
        seed = x[np.square(x - middle).sum(-1).argmax()]
        found += [free[i] for i in np.argsort(np.square(x).sum(-1) - 2 * x @ seed, kind="stable")[:size]]
        free = [i for i in free if i not in set(found[-size:])]
    found += sorted((i for i in order if late[i] > 0), key=lambda i: late[i])
    return [np.asarray(found[i : i + size]) for i in range(0, len(found), size)]


def arrange(keys: np.ndarray, late: np.ndarray, size: int, block: int) -> list[np.ndarray]:
    """Returns groups of alike keys, groups alike in nodes of 8 behind one another, nodes in nodes; 1 is partial, 2 empty."""
    levels = max(0, round(np.log2(len(keys) / block)))
    part = -(-len(keys) // (2**levels * size)) * size
    order = halve(keys, np.arange(len(keys)), late, part, levels)
    found = [group for i in range(0, len(order), part) for group in neighbours(keys, order[i : i + part], late, size)]
    if len(found) <= tree.FAN_OUT:
        return found
    whole = [(late[group] == 0).all() and len(group) == size for group in found]
    means = np.stack([keys[group].mean(0) * full for group, full in zip(found, whole, strict=True)])
    above = np.asarray([0 if full else 1 + (late[group] == 2).all() for group, full in zip(found, whole, strict=True)])
    return [found[i] for node in arrange(means, above, tree.FAN_OUT, packing.NODE_BLOCK) for i in node]


def pack(keys: np.ndarray, valid: np.ndarray, size: int) -> list[np.ndarray]:
    """Returns the pages as token numbers, empty ones included."""
    return [page[valid[page]] for page in arrange(keys, np.where(valid, 0, 2), size, packing.BLOCK)]


def factors_of(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Returns the powers of two by which channels of keys [T, H] whose queries [T, G, H] are of another size are multiplied."""
    off = np.log2(np.square(q.astype(np.float64)).mean((0, 1)) / k.astype(np.float64).var(0)) / 4
    off = off - np.median(off) if len(k) >= FEWEST else 0 * off
    return np.where(np.abs(off) < LEAST, 1.0, 2.0 ** np.clip(np.round(off), -MOST, MOST))


def outliers_first(keys: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    """Returns the tokens of a node, its outliers first, as they are in every part; of a page every token is a part."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return np.zeros(0, int)
    tokens = np.concatenate(parts)
    candidates, found = np.concatenate([part[:OUTLIERS] for part in parts]), []
    distance = np.square(keys[candidates] - keys[tokens].mean(0)).sum(-1)
    for _ in range(min(OUTLIERS, len(tokens))):
        at = (distance >= TIED * distance.max()).argmax()
        found.append(candidates[at])
        distance[at] = -1
    return np.concatenate([found, tokens[~np.isin(tokens, found)]])


def bands(size: int) -> np.ndarray:
    """Returns which channels are in which band [n, H]: eight runs of channels, alike in both halves of a head."""
    halves = 1 if size % 2 else 2
    count = max(n for n in (1, 2, 4, 8) if size // halves % n == 0)
    return np.arange(count)[:, None] == (np.arange(size) % (size // halves) * count // (size // halves))[None, :]


def others(tokens: np.ndarray) -> np.ndarray:
    """Returns those of a node that mean and width are of: all but the outliers, which are `outliers_first`, if there are more."""
    return tokens[OUTLIERS:] if len(tokens) > OUTLIERS else tokens


class Fit:
    """Values from keys: ridge regression within pages, shrunk as far as pages of other parity are not as it says.

    `shape` is how keys lie about the means of their pages, per unit of width.
    """

    def __init__(self, size: int, value_size: int) -> None:
        self.keys, self.values, self.agreement = np.zeros((size, size)), np.zeros((size, value_size)), np.zeros(2)
        self.matrix, self.shape = self.values, np.eye(size) / size

    def add(self, k: np.ndarray, v: np.ndarray, pages: list[np.ndarray]) -> None:
        halves = []
        for parity in (0, 1):
            some = [page for page in pages[parity::2] if len(page)]
            x, y = (np.concatenate([a[page] - a[page].mean(0) for page in some] or [a[:0]]) for a in (k, v))
            halves.append((x.T @ x, x.T @ y))
        for (keys, values), other in zip(halves, halves[::-1], strict=True):
            told = self.solved(*other)
            self.agreement += (told * values).sum(), (told * (keys @ told)).sum()
        self.keys, self.values = (old + a + b for old, a, b in zip((self.keys, self.values), *halves, strict=True))
        self.shape = self.keys / np.trace(self.keys) if self.keys.any() else self.shape
        self.matrix = self.solved(0, 0) * np.clip(self.agreement[0] / max(self.agreement[1], 1e-30), 0, 1)

    def solved(self, keys: np.ndarray | int, values: np.ndarray | int) -> np.ndarray:
        keys = self.keys + keys
        return np.linalg.solve(keys + max(RIDGE * np.diag(keys).mean(), 1e-20) * np.eye(len(keys)), self.values + values)


class Reference:
    """State: keys and values of every token, and which of them are sinks, in which page, or in the window."""

    def __init__(self, policy: Clustered, q: np.ndarray, k: np.ndarray, v: np.ndarray, length: int, *, clock: int = 0) -> None:
        """Takes queries [T, G, H], keys and values [T, H]; `clock` is where that of its batch stood when the row joined."""
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
        # Those that the others of its batch had filled by then are empty, and the next one will not be full.
        self.pages += [np.zeros(0, int)] * (clock // policy.page_size)
        self.steps = clock
        self.nodes: dict[bytes, np.ndarray] = {}
        self.facts: dict[bytes, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.bands = bands(k.shape[1])

    def node(self, parts: list[np.ndarray]) -> np.ndarray:
        """Returns `outliers_first`, which is the same in every step for the same tokens."""
        key = b"".join(part.tobytes() for part in parts)
        if key not in self.nodes:
            self.nodes[key] = outliers_first(self.k, parts)
        return self.nodes[key]

    def described(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns mean and variance of a node's keys without the outliers, and the mean of its values; once per node."""
        key = tokens.tobytes()
        if key not in self.facts:
            k = self.k[others(tokens)]
            self.facts[key] = k.mean(0), k.var(0), self.v[tokens].mean(0)
        return self.facts[key]

    def score(self, q: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the estimated log-sum-exps of a page or node, outliers first, [2, G]: to choose by, and to weigh by."""
        if not len(tokens):
            return np.full((2, len(q)), -np.inf)
        s = q / q.shape[-1] ** 0.5
        first, second = np.log(len(tokens)) + s @ self.described(tokens)[0], 0.5 * self.wide(q, tokens)
        return np.maximum([first + second, first + np.minimum(second, TAIL_CLAMP)], (s @ self.k[tokens[:OUTLIERS]].T).max(-1))

    def moved(self, q: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns by how much a node's mean key moves under softmax, to first order and boundedly, [G, H]."""
        s, bound = q / q.shape[-1] ** 0.5, np.sqrt(np.minimum(1, TAIL_CLAMP / np.maximum(0.5 * self.wide(q, tokens), 1e-30)))
        shape = (self.fit.shape + np.diag(np.diag(self.fit.shape))) / 2
        return s @ shape * self.described(tokens)[1].sum() * bound[:, None]

    def told(self, keys: np.ndarray) -> np.ndarray:
        """Returns what differences of keys tell of values."""
        return keys @ self.fit.matrix if self.policy.value_fit else np.zeros(self.v.shape[1])

    def wide(self, q: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the variance of the scores of a node's keys [G]: their own in each band, inside it as of all of the head."""
        s, own = q / q.shape[-1] ** 0.5, np.diag(self.fit.shape)
        return (s**2 * own @ self.bands.T / (own @ self.bands.T)) @ (self.bands @ self.described(tokens)[1])

    def best(self, scores: np.ndarray, count: int) -> np.ndarray:
        """Returns the candidates of largest softmax, summed over the group, among those not empty."""
        filled = np.flatnonzero(~np.isneginf(scores[0]))
        if not len(filled):
            return filled
        share = np.exp(scores[:, filled] - scores[:, filled].max(-1, keepdims=True))
        share = (share / share.sum(-1, keepdims=True)).sum(0)
        return filled[np.argsort(-share, kind="stable")[:count]]

    def step(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Appends a token and returns the attention output [G, H] of its queries."""
        q = q.astype(np.float64) / self.factors
        self.k, self.v = np.vstack([self.k, k * self.factors]), np.vstack([self.v, v])
        self.window.append(len(self.k) - 1)
        out, _ = self.look(q, np.asarray([*self.sinks, *self.window], int))
        self.steps += 1
        if self.steps % self.policy.page_size == 0:
            end = len(self.k) - self.policy.window_layout.fill  # of the window's oldest page
            page, self.window = [t for t in self.window if t < end], [t for t in self.window if t >= end]
            self.pages.append(np.asarray(page, int))
        if self.policy.compact_every and self.steps % self.policy.compact_every == 0:
            count = self.policy.compact_every // self.policy.page_size
            tokens = np.concatenate(self.pages[-count:])
            keys = np.zeros((self.policy.compact_every, q.shape[-1]))
            keys[: len(tokens)] = self.k[tokens]
            packed = pack(keys, np.arange(len(keys)) < len(tokens), self.policy.page_size)
            self.pages[-count:] = [tokens[page] for page in packed]
            self.fit.add(self.k, self.v, self.pages[-count:])
        return out

    def walk(self, q: np.ndarray, count: int) -> tuple[list[np.ndarray], list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """Returns the tokens of the best `count` pages, and of all other pages and nodes log-sum-exp [G], tokens, value [G, H]."""
        levels = [[self.node(list(page[:, None])) for page in self.pages]]
        while len(levels[-1]) > tree.TOP:
            runs = range(0, len(levels[-1]), tree.FAN_OUT)
            levels.append([self.node(levels[-1][i : i + tree.FAN_OUT]) for i in runs])
        candidates, rest = list(range(len(levels[-1]))), []
        several = max(self.policy.opened, 2 * -(-self.policy.num_ranked(2**20) // tree.FAN_OUT))
        for level in range(len(levels) - 1, -1, -1):
            nodes = [levels[level][i] for i in candidates]
            both = [self.score(q, tokens) for tokens in nodes]
            estimates, scores = np.stack(both, axis=2) if both else np.zeros((2, len(q), 0))
            if level:
                opened = set(self.best(estimates, several).tolist())
                rest += [(scores[:, i], nodes[i]) for i in range(len(nodes)) if i not in opened]
                firsts, below = [candidates[i] * tree.FAN_OUT for i in opened], len(levels[level - 1])
                candidates = sorted(c for f in firsts for c in range(f, f + tree.FAN_OUT) if c < below)
        best = self.best(estimates, count)
        rest += [(scores[:, i], nodes[i]) for i in range(len(nodes)) if i not in set(best.tolist())]
        rest = [(s, tokens) for s, tokens in rest if len(tokens)] if self.policy.tail else []
        # Softmax moves the mean key of a node along the query, and with it the mean value.
        rest = [(s, tokens, self.described(tokens)[2] + self.told(self.moved(q, tokens))) for s, tokens in rest]
        return [nodes[i] for i in best], rest

    @property
    def keys_first(self) -> bool:
        """Whether the keys of more pages are fetched than the values."""
        return self.policy.keys_first

    def look(self, q: np.ndarray, resident: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the attention output [G, H] of queries beside tokens that are attended exactly, and `uneven` [G].

        That is how far the weights of tokens not attended exactly are from those they count with: the root of the summed squares,
        of pages not fetched as expected of normal scores, over the norm of the output.
        """
        ranked = self.policy.num_ranked if self.keys_first else self.policy.num_fetched
        pages, rest = self.walk(q, ranked(len(self.pages)))
        # Of the tokens ranked the best are attended exactly, the others of a page by their own weight and mean value, which is
        # that of the whole page where their values do not come.
        fetched = np.concatenate([np.zeros(0, int), *pages])
        s = q @ self.k.T / q.shape[-1] ** 0.5
        everything = np.concatenate([s[:, resident], s[:, fetched], *(s[:, None] for s, *_ in rest)], axis=1)
        share = np.exp(s[:, fetched] - everything.max(-1, keepdims=True))
        share /= np.exp(everything - everything.max(-1, keepdims=True)).sum(-1, keepdims=True)
        kept = fetched[np.argsort(-share.sum(0), kind="stable")[: self.policy.budget - len(resident)]]
        base = np.logaddexp.reduce(everything, axis=1)
        uneven = sum(np.exp(2 * (x - base)) * self.alone(q, tokens) for x, tokens, _ in rest)
        others = [(np.setdiff1d(page, kept), page) for page in pages] if self.policy.tail else []
        for tokens, page in others:
            if not len(tokens):
                continue
            page = page if self.keys_first else tokens
            total = np.logaddexp.reduce(s[:, tokens], axis=1)
            key = np.exp(s[:, tokens] - total[:, None]) @ self.k[tokens] - self.k[page].mean(0)
            uneven = uneven + np.square(np.exp(s[:, tokens] - base[:, None])).sum(1) - np.exp(2 * (total - base)) / len(tokens)
            rest.append((total, tokens, self.v[page].mean(0) + self.told(key)))
        exact = np.concatenate([resident, kept])
        logits = np.concatenate([s[:, exact], *(s[:, None] for s, *_ in rest)], axis=1)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out = weights[:, : len(exact)] @ self.v[exact]
        out += sum(w[:, None] * value for w, (*_, value) in zip(weights[:, len(exact) :].T, rest, strict=True))
        out /= weights.sum(-1, keepdims=True)
        return out, np.sqrt(np.maximum(uneven, 0)) / np.linalg.norm(out, axis=-1)

    def alone(self, q: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns by how much single tokens' shares of a node vary in all, of normal scores, [G]."""
        return np.minimum(np.expm1(np.minimum(self.wide(q, tokens), 2 * TAIL_CLAMP)) / len(tokens), 1)
