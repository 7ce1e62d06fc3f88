"""Requests that come and go: who gets a place in the batch, and what the device does next."""
