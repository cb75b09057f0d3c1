"""Measurements anyone can repeat; each command prints one table of ratios from one run."""
