"""Leaves: what loraaccel knows of other packages. They are imported by nobody but `patching`, and import lazily."""
