"""Tables for serving, in fewer bytes: collections, their kernels, and how trained models become them.

Files, in reading order::

    formats.py        number formats: rows to bytes and back; the bytes of all tables in one tensor
    kernels.py        lookups of packed rows
    collections.py    QuantEmbeddingBagCollection, QuantEmbeddingCollection
    quantize.py       quantize_embeddings: every collection of a model; quantization_report: errors, bytes and scores
"""
