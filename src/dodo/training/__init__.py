"""Training of adapters, scorer and soft token. Paper: Sections 2.4, 3 and 4, Appendix B."""
