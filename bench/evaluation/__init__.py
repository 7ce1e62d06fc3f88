"""The runs of `icejax evaluate` for bench/results/evaluation.md, and the page: ``python -m bench.evaluation``."""
