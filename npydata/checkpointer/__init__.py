"""Save training without stopping it, and without ever losing a checkpoint to a crash.

Built in ``notebooks/05_async_checkpointer``.
"""
