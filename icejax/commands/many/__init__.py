"""Files of many prompts: shares of them, answers in a file that grows, and a run that goes on where it ended."""
