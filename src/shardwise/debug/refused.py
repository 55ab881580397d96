"""Why operators are refused: those of torch's operator database, and those that nothing covers."""

from __future__ import annotations

VIEW = "the sample is a view whose parts are no shards: refused with the redistribution that makes it one"
SPARSE = "sparse tensors cannot be distributed: `x.to_dense()` first"
MIXED = "PyTorch makes a plain tensor inside: run it under `shardwise.implicit_replication()`"
RESIZE = "a distributed tensor does not change its size in place"

# The operators of `torch.testing`'s `op_db` that are refused, forward or backward.
REFUSED = {
    "as_strided": VIEW,
    "nn.functional.linear_cross_entropy.chunked_none": f"only the gradients: {MIXED}",
    "pca_lowrank": f"its start is drawn at random: {MIXED}",
    "resize_": RESIZE,
    "resize_as_": RESIZE,
    "sparse.mm.reduce": SPARSE,
    "sparse.sampled_addmm": SPARSE,
    "svd_lowrank": f"its start is drawn at random: {MIXED}",
    "to_sparse": SPARSE,
    "view_as": VIEW,
    "view_as_complex": VIEW,
}

WITHOUT_TENSORS = "they take no tensor, and make plain ones: use the factories of shardwise (`shardwise.zeros`, ...)"

# By what names are, the first that fits.
UNCOVERED = (
    (r"sparse|coo|csr|csc|bsr|bsc|coalesce|indices|^_?values|dense_dim|_nnz|_dim[IV]|sspaddmm|hspmm|spsolve", SPARSE),
    (r"quant|^q_|qscheme|int_repr|int4|int8|_int_mm|fq_helper|_4bit|_scaled_", "quantized or scaled tensors"),
    (r"nested|jagged|padded", "nested tensors"),
    (
        r"cudnn|miopen|mkldnn|mps|nnpack|triton|_slow_|slow_conv|_cslt|batch_norm_|rnn|lstm|gru|depthwise",
        "kernels of one backend, which PyTorch's own operators choose",
    ),
    (
        r"_test_|_foobar|_print|_assert|assert_|constrain|dep_token|_fw_primal|_make_dual|_jvp|dual",
        "of PyTorch's own workings: checks, tests, forward gradients",
    ),
    (r"resize|^set|storage|_copy_from|record_stream|pinned|is_set_to|lazy_clone", RESIZE + ", nor its memory"),
    (r"_foreach_|_fused_|_amp_", "list variants without an operator for each entry"),
    (r"", "no rule yet: `shardwise.register_rule`, or run it under `shardwise.replicate_unknown()`"),
)
