"""Measuring methods of holding a context, by one narrow protocol, on the paper's tasks. Paper: Sections 4 and 6, Appendix E."""
