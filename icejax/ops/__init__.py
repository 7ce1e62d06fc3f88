"""Attention, top-k, RoPE, experts and pages as functions of arrays; models, policies and the engine call them.

Axis letters: B batch, T queries, S keys, N query heads, K KV heads, G = N / K, H size of a query and a key, Hv size of a value
(both are head_dim where they are equal), D hidden, V vocabulary, P pages, p slots of a page, M selected pages, L layers, E
experts, R = B K in one axis. In a mask g is G, or 1 where all query heads share the mask.
"""
