"""Reference attention: softmax with an explicit mask, in float64."""

import numpy as np


def capped(scores, softcap):
    """Returns soft-capped scores, or the scores themselves if `softcap` is None."""
    return scores if softcap is None else softcap * np.tanh(scores / softcap)


def weights(q, k, mask, softcap=None):
    """Returns weights f64[N, T, S] and the scores' log-sum-exp f64[T, N]; q [T, N, H], k [S, K, H], mask bool[T, S]."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1).astype(np.float64)
    scores = capped(np.einsum("tnh,snh->nts", q.astype(np.float64), k) / q.shape[-1] ** 0.5, softcap)
    highest = scores.max(-1, keepdims=True)
    exponentials = np.where(mask, np.exp(scores - highest), 0)
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / total, (np.log(total) + highest)[..., 0].T


def attention(q, k, v, mask, softcap=None):
    """Returns the attention f64[T, N, H] and its log-sum-exp f64[T, N]; v [S, K, H], other arguments as in `weights`."""
    probabilities, lse = weights(q, k, mask, softcap)
    return np.einsum("nts,snh->tnh", probabilities, np.repeat(v, q.shape[1] // v.shape[1], axis=1).astype(np.float64)), lse


def causal(tokens, window=None):
    """Returns the causal mask bool[tokens, tokens]; a query sees only the `window` newest keys, its own included."""
    query, key = np.arange(tokens)[:, None], np.arange(tokens)[None, :]
    return (key <= query) & (key > query - (window or tokens))
