"""Text: tokenizer, chat template, turns of a chat, and tokens back to text."""
