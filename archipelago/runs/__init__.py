"""Run directories: the one place that reads and writes them, with checkpoints and storage."""
