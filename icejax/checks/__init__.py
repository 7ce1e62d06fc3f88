"""What a bad input is told: the error, the ranges of numbers, JSON files that anyone may have written."""
