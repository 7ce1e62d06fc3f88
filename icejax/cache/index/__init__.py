"""Page indexes: the device-side summaries of all pages, by which a retrieval policy selects pages or tokens."""
