"""Softmax attention with explicit masks, in float64."""

import numpy as np


def capped(scores, softcap):
    """Returns scores with a soft cap; None: as they are."""
    return scores if softcap is None else softcap * np.tanh(scores / softcap)


def weights(q, k, mask, softcap=None):
    """Returns the weights f64[N, T, S], and the log-sum-exp f64[T, N] of the scores; q [T, N, H], k [S, K, H], mask bool[T, S]."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1).astype(np.float64)
    scores = capped(np.einsum("tnh,snh->nts", q.astype(np.float64), k) / q.shape[-1] ** 0.5, softcap)
    highest = scores.max(-1, keepdims=True)
    found = np.where(mask, np.exp(scores - highest), 0)
    total = found.sum(-1, keepdims=True)
    return found / total, (np.log(total) + highest)[..., 0].T


def attention(q, k, v, mask, softcap=None):
    """Returns the attention f64[T, N, H], and its log-sum-exp f64[T, N]; v [S, K, H], the others as above."""
    found, lse = weights(q, k, mask, softcap)
    return np.einsum("nts,snh->tnh", found, np.repeat(v, q.shape[1] // v.shape[1], axis=1).astype(np.float64)), lse


def causal(tokens, window=None):
    """Returns which of `tokens` keys each of as many queries sees: the `window` newest up to itself, all with None."""
    query, key = np.arange(tokens)[:, None], np.arange(tokens)[None, :]
    return (key <= query) & (key > query - (window or tokens))
