"""Over time: record a trainer that nobody edits, and compare two runs of it.

``fingerprints`` hashes a part of a tensor so that parts add up to the whole, ``found`` finds the
model of a running script, ``recorder`` hooks a trainer, ``files`` writes and reads what it records,
``comparing`` names the first difference of two records, ``page`` shows it in HTML, and ``resuming``
compares a run that was loaded; ``pieces`` are what a load has changed.
"""
