"""Tasks for lm-evaluation-harness that it lacks, or that it reads from a hub: their data come from local files."""
