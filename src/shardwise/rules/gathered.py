"""Operators that see whole tensors: every rank computes all of the answer.

What a rank could do with its part alone would be no part of the answer: the distinct values of a tensor, a histogram
whose range follows from the data, a least-squares solution. Where the size of the answer follows from the data as well,
it is *measured*.
"""

from __future__ import annotations

from shardwise.rules.rule import Rule

MEASURED = """
    nonzero nonzero_static masked_select _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive bincount
    histogram.bins_tensor histogram.bin_ct _histogramdd_bin_edges _histogramdd_from_bin_cts
    _histogramdd_from_bin_tensors segment_reduce _segment_reduce_backward linalg_lstsq
"""

ONE, TWO = "f(_) -> _", "f(_, _) -> _"

RULES: dict[str, str | Rule] = {
    **dict.fromkeys(MEASURED.split(), Rule(measured=True)),
    "histc": ONE,
    "hash_tensor": ONE,
    "linspace.Tensor_Tensor": TWO,
    "linspace.Tensor_Scalar": ONE,
    "linspace.Scalar_Tensor": ONE,
    "logspace.Tensor_Tensor": TWO,
    "logspace.Tensor_Scalar": ONE,
    "logspace.Scalar_Tensor": ONE,
}
