"""The runs of `icejax evaluate` behind bench/results/evaluation.md, and the page: ``python -m bench.evaluation``."""
