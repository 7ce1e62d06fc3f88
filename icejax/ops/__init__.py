"""Arrays in, arrays out; knows no icejax state.

Axis letters: B batch, T queries, S keys, N query heads, K KV heads, G = N / K, H head_dim, D hidden, P pages,
p slots of a page, M selected pages.
"""
