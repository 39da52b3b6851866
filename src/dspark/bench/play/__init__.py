"""Asking a suite's questions, of a server or of an engine in this process."""
