"""Views of a run: from its story to figures, tables and pages. In the kernel, without torch."""
