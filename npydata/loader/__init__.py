"""The prefetching loader: order, worker threads, hand-over, tuning."""
