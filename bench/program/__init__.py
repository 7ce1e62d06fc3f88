"""Compiles a decode step for a GPU or TPU that this machine does not have, counts its work and estimates its time."""
