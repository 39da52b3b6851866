"""What a suite's answers add up to: figures, tables, comparisons, pages. No engine, no network."""
