"""The examination of a draft checkpoint: what is wrong with it, why, and how to mend it.

A wrong draft is accepted by every engine and drafts rubbish: the text stays right, only the speed
is gone. Each check here asks one question that a public project learnt to ask the hard way; its
identifier names the fault. ``files`` and ``weights`` look at a folder, ``rules`` is the table of
what each engine reads, ``tokens`` compares with the target's tokenizer, and ``live`` runs the draft
beside its target under the declared and under the plausible wrong conventions.
"""
