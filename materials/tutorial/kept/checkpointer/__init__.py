"""Save training without stopping it, and without ever losing a checkpoint to a crash.

Built in ``notebooks/07_async_checkpointer``.
"""
