"""Are the answers right? A fast engine that says wrong things must show."""
