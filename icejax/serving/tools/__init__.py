"""Tool calls: the forms in which models write them, the grammar that makes a model write one, and parsers of their streams."""
