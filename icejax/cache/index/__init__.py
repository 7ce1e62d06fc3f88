"""Page indexes: what a retrieval policy keeps on the device of every page, to find pages by."""
