"""All tolerances of the tests. Loosen one only with a measured reason beside it."""

LOGITS = 1e-4  # fp32 logits against transformers; measured at most 1.2e-5 over all families at both weight scales
EXACT = 1e-5  # fp32, two ways of computing the same thing
CODES = 2e-3  # a step of one channel of one page rounds the other way in int8 at 4 bits; measured 1.5e-3 in that KV head, 1e-6 in others
CODES_ON_DEVICES = 5e-3  # logits, where one channel of one page did that on one of two devices; measured 3.3e-3, 3e-6 before
DIGEST = 1e-5  # fp32 digests against float64
HALF = 0.04  # bf16 attention and its log-sum-exp, rounded to 2^-9 of values up to 16; measured at most 0.030
ANGLE = 2.0**-22  # relative, of a RoPE angle: fp32 rounds the angles of two positions and of their sum, each by up to 2^-24
