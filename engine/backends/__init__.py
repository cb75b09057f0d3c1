"""The engines a worker can own: a managed vLLM, a remote server, an echo for tests."""
