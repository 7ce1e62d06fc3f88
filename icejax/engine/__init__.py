"""From token ids to token ids: the plan, prefill, the decode step, and rows of a batch."""
