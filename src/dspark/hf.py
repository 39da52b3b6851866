"""``import dspark.hf``: transformers' Auto classes then load DSpark drafts, without remote code.

    import dspark.hf
    from transformers import AutoModel

    model = AutoModel.from_pretrained("runs/quickstart/draft")  # model.draft is the module

See :mod:`dspark.checkpoint.hf` for what is strict about it, and for drafts of the qwen3 flavour.
"""

from dspark.checkpoint.hf import DSparkConfig, DSparkModel, register

register()

__all__ = ["DSparkConfig", "DSparkModel", "register"]
