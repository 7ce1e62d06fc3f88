"""Input and output of a command at a terminal or a pipe: its begin and end, progress, text and input."""
