"""Meshes of ranks: layouts (`layout`), worlds and groups (`world`), meshes (`mesh`)."""
