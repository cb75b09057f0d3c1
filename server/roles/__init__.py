"""Overnight's processes on one machine: the supervisor and its children, the folder they share, how they end."""
