"""Dense attention, and sums of attention weights by key."""
