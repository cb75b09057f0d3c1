"""Owns one engine and runs shards on it; never decides a batch's fate."""
