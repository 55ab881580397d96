"""Checkpoints: saving, loading and resharding distributed tensors."""

__all__ = ()
