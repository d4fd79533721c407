"""Throughput of single tiles from the nearest caches, on each instruction set."""
