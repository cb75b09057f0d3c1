"""How people talk to Overnight: the HTTP API in OpenAI's shapes, and the command line."""
