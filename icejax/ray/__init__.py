"""Many models on a Ray cluster: jobs over files, and servers behind a router. It needs the extra `ray`."""
