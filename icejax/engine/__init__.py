"""The engine, from token ids to token ids: plan, prefill, extend, decode step and loop, rows of a batch, sampling."""
