"""``python -m dspark``."""

from dspark.cli.main import entry

entry()
