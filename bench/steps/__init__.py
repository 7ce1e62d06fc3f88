"""Decode steps to time or to compile: shapes of models, filled caches, subjects, their sizes and named scopes."""
