"""Tests of single C tile kernels, one file for each of csrc/kernel/."""
