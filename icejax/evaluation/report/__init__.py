"""The report on finished evaluations: what each run took, rows, a table, plots and a page."""
