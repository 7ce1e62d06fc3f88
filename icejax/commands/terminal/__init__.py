"""What a command reads from a terminal or a pipe, and what it shows there: its begin and end, progress, text and input."""
