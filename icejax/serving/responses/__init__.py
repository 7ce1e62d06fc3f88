"""The parts of `/v1/responses`: a conversation from a body's items, and a response's items and events from an answer."""
