"""dspark trains, proves, serves and measures DSpark drafts.

Importing the package imports neither torch nor transformers, so the command line answers at once.
"""

__version__ = "0.1.0"
