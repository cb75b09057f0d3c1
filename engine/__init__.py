"""How work gets done: the JSONL codec, the orchestrator's jobs, the worker's scheduler and the engines behind it."""
