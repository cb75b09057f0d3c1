"""Plans, finishes, sweeps and cleans; never talks to an engine."""
