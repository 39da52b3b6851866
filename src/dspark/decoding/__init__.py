"""The mathematics of speculative decoding as pure tensor functions: no model, no cache, no files.

``sampling`` turns logits into distributions and draws from them, ``verify`` decides which drafted
tokens stay, ``acceptance`` counts what that gained. Import from the modules.
"""
