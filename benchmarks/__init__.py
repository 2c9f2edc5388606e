"""The cost of our hop, measured beside the field in one run: `python -m benchmarks`. See docs/performance.md.

Nothing here is part of the product. Everything talks to 127.0.0.1 only, is bounded, and ends what it started.
"""
