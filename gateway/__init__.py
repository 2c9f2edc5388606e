"""Firsttoken: a latency-aware reverse-proxy gateway for self-hosted language models."""

__version__ = "0.1.0"
