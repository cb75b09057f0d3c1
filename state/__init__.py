"""What is true and durable: settings, records, the ledger and the object store.

Nothing in this package talks HTTP or to an engine, and nothing above it knows SQL.
"""
