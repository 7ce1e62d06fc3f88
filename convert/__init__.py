"""Command lines that convert a checkpoint folder between the Hugging Face form and icejax's own."""
