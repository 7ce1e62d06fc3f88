"""The report on finished evaluations: the cost of each run, rows, a table, plots and a page."""
