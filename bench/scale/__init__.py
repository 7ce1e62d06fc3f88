"""What one of several devices has, computes and moves in a decode step, and the least time that each link needs."""
