"""Files of many prompts: shares of them, answers in a file that grows, and a run that continues where it ended."""
