"""Dense attention, and sums of attention weights."""
