"""Measures all parts of a benchmark on a device that is lent for minutes, by one command."""
