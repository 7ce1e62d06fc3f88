"""Files and folders of the user: written whole or not at all, by one process at a time."""
