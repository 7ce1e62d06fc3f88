"""The arrays, computations and traffic of one of several devices in a decode step, and the least time of each link."""
