"""The user's files and folders: written whole or not at all, by one process at a time."""
