"""The server: OpenAI's API over HTTP on an engine. It needs the extra `serve`."""
