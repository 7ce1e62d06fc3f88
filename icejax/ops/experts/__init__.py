"""Mixtures of experts: products of each token with its experts, and experts in host memory."""
