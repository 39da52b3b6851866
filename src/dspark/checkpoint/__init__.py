"""Models on disk: targets from packages, paths or the hub, and our own draft checkpoints."""
