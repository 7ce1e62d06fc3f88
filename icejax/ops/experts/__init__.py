"""Mixtures of experts: forward passes through the chosen experts, and experts in host memory."""
