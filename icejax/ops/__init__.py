"""Arrays in, arrays out; knows no icejax state.

Axis letters: B batch, T queries, S keys, N query heads, K KV heads, G = N / K, H size of a query and a key, Hv of a value
(head_dim, where both are the same), D hidden, V vocabulary, P pages, p slots of a page, M selected pages, L layers, R = B K in
one axis. In a mask g is G, or 1 if it is of all query heads.
"""
